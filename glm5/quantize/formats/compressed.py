"""compressed-tensors: what vLLM loads, SGLang and transformers in part.

    int4    weight_packed int32 [O, I / 8], weight_scale bfloat16 [O, G], weight_shape int64 [2]     pack-quantized
    int8    weight int8 [O, I], weight_scale float32 [O, 1]                                          int-quantized
    e4m3    weight e4m3 [O, I], weight_scale float32 [O, 1] or [O / 128, I / 128]                    float-quantized

Two facts of vLLM decide details. Its Hopper kernel for int4 under e4m3 turns the group scales of a row into e4m3 times
one float32 when it loads: scales are rounded that way before codes are, so nothing is lost there. And patterns name
modules as they are before it merges q_a with kv_a and gate with up.
"""

from typing import Any

import torch
from torch import Tensor

from glm5.kernels.block_scaled import FP8
from glm5.quant.record import Grid, Quantized, Scheme
from glm5.quantize.formats.base import Extras, Fetch, Matrix, exact_bf16, needs_int4_g128, scheme_name
from glm5.quantize.formats.packing import pack_int32, unpack_int32
from glm5.quantize.formats.targets import ignored, targets
from glm5.quantize.plan import Plan
from glm5.quantize.source import STACK

VERSION = "0.20.0"
_LEAST = 8 * 2.0**-6  # an eighth of it is e4m3's smallest number of full precision
_FORMATS = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}


class CompressedTensors:
    """`engine`: who is to load it, which decides what is refused."""

    name = "compressed-tensors"
    shard_prefix = "model"

    def __init__(self, engine: str, *, e4m3_scales: bool = False) -> None:
        self.engine, self.e4m3_scales = engine, e4m3_scales

    def refusal(self, module: str, scheme: Scheme) -> str | None:
        weight, act, name = scheme.weight, scheme.act, scheme_name(scheme)
        if not weight.symmetric or weight.kind == "nvfp4" or (weight.kind == "int" and weight.bits not in (4, 8)):
            return f"{self.engine} loads no {name} from compressed-tensors"
        if module.endswith(("kv_b_proj", "indexer.wk", "indexer.weights_proj")):
            return f"{self.engine} needs {module} as it is (it merges or folds it)"
        if weight.bits == 4 and not needs_int4_g128(scheme):
            return f"kernels of {self.engine} take int4 in groups of 128, not {name}"
        if weight.bits == 4 and act is not None and (act.kind != "fp8" or self.engine != "vllm"):
            return f"{self.engine} has no kernel for {name}"
        if weight.bits == 8 and weight.kind == "int" and (act is None or weight.scope != "channel"):
            return f"kernels of {self.engine} take int8 per channel under int8 tokens, not {name}"
        if self.engine == "sglang" and weight.bits == 8 and module.startswith(STACK):
            return f"sglang has no kernel for experts in {name}; --scheme fp8 or w4a8 have one"
        return None

    def stored_scale(self, scale: Tensor, grid: Grid) -> Tensor:
        if grid.bits != 4:
            return scale
        return two_level_scale(scale) if self.e4m3_scales else exact_bf16(scale)

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        module, weight = matrix.module, matrix.weight
        if weight.grid.bits == 4:
            return {
                f"{module}.weight_packed": pack_int32(weight.codes),
                f"{module}.weight_scale": weight.scale.to(torch.bfloat16),
                f"{module}.weight_shape": torch.tensor(weight.codes.shape),
            }
        return {f"{module}.weight": weight.codes, f"{module}.weight_scale": weight.scale.float()}

    def read(self, module: str, scheme: Scheme, fetch: Fetch) -> Quantized:
        grid = scheme.weight
        codes = unpack_int32(fetch(f"{module}.weight_packed")) if grid.bits == 4 else fetch(f"{module}.weight")
        return Quantized(grid, codes, fetch(f"{module}.weight_scale").float()).check()

    def config(self, plan: Plan) -> dict[str, Any]:
        patterns = targets(plan)
        groups: dict[str, Any] = {}
        for idx, (scheme, names) in enumerate(patterns.items()):
            groups[f"group_{idx}"] = {
                # Engines that look for one scheme of the whole model look for it under this name.
                "targets": ["Linear"] if len(patterns) == 1 else names,
                "weights": _weights(scheme.weight),
                "input_activations": None if scheme.act is None else _activations(scheme.act),
                "output_activations": None,
                "format": _FORMATS[_kind(scheme.weight)],
            }
        formats = {group["format"] for group in groups.values()}
        return {
            "config_groups": groups,
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": None,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": ignored(plan),
            "version": VERSION,
            "sparsity_config": {},
            "transform_config": {},
        }

    def extras(self, plan: Plan, stored: dict[str, str]) -> Extras:
        return Extras()


def two_level_scale(scale: Tensor) -> Tensor:
    """Group scales [..., O, G], rounded so that vLLM's conversion finds them again: e4m3 times a float32 a row.

    The conversion divides a row by its largest scale / 448, rounds to e4m3, and divides that by 8. What is stored is
    such a product in bfloat16, within 2^-9 of it: dividing again ends at the same e4m3 number.
    """
    top = scale.amax(-1, keepdim=True).to(torch.bfloat16).to(scale.dtype).clamp_min(torch.finfo(torch.bfloat16).tiny)
    factor = top / 448
    held = (scale / factor).clamp(_LEAST, 448).to(FP8).to(scale.dtype)
    return exact_bf16(held * factor)


def _kind(grid: Grid) -> str:
    return "fp8" if grid.kind == "fp8" else f"int{grid.bits}"


def _weights(grid: Grid) -> dict[str, Any]:
    held: dict[str, Any] = {
        "num_bits": grid.bits,
        "type": "float" if grid.kind == "fp8" else "int",
        "symmetric": grid.symmetric,
        "group_size": grid.group if grid.scope == "group" else None,
        "strategy": grid.scope,
        "dynamic": False,
    }
    return held | ({"block_structure": [grid.group, grid.group]} if grid.scope == "block" else {})


def _activations(grid: Grid) -> dict[str, Any]:
    return {
        "num_bits": grid.bits,
        "type": "float" if grid.kind == "fp8" else "int",
        "symmetric": grid.symmetric,
        "group_size": grid.group,
        "strategy": grid.scope,
        "dynamic": True,
    }
