"""compressed-tensors: what vLLM loads, SGLang and transformers in part.

    pack-quantized         weight_packed int32 [O, I / 8], weight_scale bfloat16 [O, G], weight_shape int64 [2]
    int-quantized          weight int8 [O, I], weight_scale float32 [O, 1]
    float-quantized        weight e4m3 [O, I], weight_scale float32 [O, 1] or [O / 128, I / 128]
    nvfp4-pack-quantized   weight_packed uint8 [O, I / 2], weight_scale e4m3 [O, I / 16], weight_global_scale float32

The last is a divisor; powers of two are written, whose reciprocals are exact.

Two facts of vLLM decide details. Its Hopper kernel for int4 under e4m3 turns the group scales of a row into e4m3 times
one float32 when it loads: scales are rounded that way before weights are, so nothing is lost there. And patterns name
modules as they are before it merges q_a with kv_a and gate with up.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.formats.base import (
    ON_DISK,
    Format,
    Matrix,
    Role,
    Schemes,
    Stored,
    StoredTensor,
    exact_bf16,
    scheme_name,
)
from glm5.checkpoint.formats.packing import INT32, PAIRS
from glm5.checkpoint.formats.patterns import CLASS, ignored_patterns, lookup, target_patterns
from glm5.checkpoint.names import STACK
from glm5.checkpoint.shard import TensorEntry
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.quantize import Target
from glm5.config.refusal import refuse
from glm5.kernels.block_scaled import FP8
from glm5.quant.record import NVFP4_GROUP, Grid, Scheme

VERSION = "0.20.0"
MARLIN_GROUPS = (32, 64, 128)
"""Of vLLM's and SGLang's kernels for int4 without quantized activations (`marlin_utils.py`)."""
_LEAST = 8 * 2.0**-6  # an eighth of it is e4m3's smallest number of full precision
_FORMATS = {
    ("int", 4): "pack-quantized",
    ("int", 8): "int-quantized",
    ("float", 8): "float-quantized",
    ("float", 4): "nvfp4-pack-quantized",
}
_WEIGHTS, _ACTS = "weights", "input_activations"


class CompressedTensors(Format):
    """See the module's first lines."""

    name = "compressed-tensors"
    targets = ("vllm", "sglang", "ascend")

    def refusal(self, module: str, scheme: Scheme, target: Target) -> str | None:
        weight, act, name = scheme.weight, scheme.act, scheme_name(scheme)
        engine = "vllm-ascend" if target == "ascend" else target
        if not weight.symmetric or (weight.kind == "int" and weight.bits not in (4, 8)):
            return f"{engine} loads no {name} from compressed-tensors"
        if weight.kind == "nvfp4" and (engine == "vllm-ascend" or act is not None):
            return f"{engine} loads nvfp4 under 16-bit activations from compressed-tensors, and on GPUs alone"
        if module.endswith(("kv_b_proj", "indexer.wk", "indexer.weights_proj")):
            return f"{engine} needs {module} as it is (it merges or folds it)"
        groups = MARLIN_GROUPS if act is None and engine != "vllm-ascend" else (128,)
        if weight.kind == "int" and weight.bits == 4 and weight.group not in groups:
            return f"kernels of {engine} take int4 in groups of {' or '.join(map(str, groups))} there, not {name}"
        if weight.bits == 4 and act is not None and (act.kind != "fp8" or engine != "vllm"):
            return f"{engine} has no kernel for {name}"
        if weight.bits == 8 and weight.kind == "int" and (act is None or weight.scope != "channel"):
            return f"kernels of {engine} take int8 per channel under int8 tokens, not {name}"
        if engine == "sglang" and weight.bits == 8 and module.startswith(STACK):
            return f"sglang has no kernel for experts in {name}; --scheme fp8 or w4a8 have one"
        return None

    def stored_scale(self, scale: Tensor, scheme: Scheme) -> Tensor:
        if scheme.weight.bits != 4:
            return scale
        return exact_bf16(scale) if scheme.act is None else two_level_scale(scale)

    def stored_tensor_scale(self, scale: Tensor) -> Tensor:
        """The next power of two."""
        mantissa, exponent = torch.frexp(scale)
        return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())

    def layout(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
        grid, (rows, columns) = scheme.weight, shape
        if not grid.symmetric:
            raise ConfigError("asymmetric weights of compressed-tensors are not read; allowed: symmetric ones")
        name, scales = f"{module}.weight_scale", grid.scale_shape(shape)
        if grid.bits != 4:
            codes = StoredTensor(f"{module}.weight", (ON_DISK[grid.kind],), shape)
            scale = StoredTensor(name, ("F32", "BF16", "F16"), scales)
            return Stored(module, scheme, shape, {"codes": codes, "scale": scale})
        if grid.kind == "nvfp4":
            parts: dict[Role, StoredTensor] = {
                "codes": StoredTensor(f"{module}.weight_packed", ("U8",), (rows, columns // 2)),
                "scale": StoredTensor(name, ("F8_E4M3",), scales),
                "tensor_scale": StoredTensor(f"{module}.weight_global_scale", ("F32",), (1,), is_divisor=True),
            }
            # Of the published schemes, for activations in FP4, which this engine leaves as they are.
            return Stored(module, scheme, shape, parts, PAIRS, foreign=(f"{module}.input_global_scale",))
        codes = StoredTensor(f"{module}.weight_packed", ("I32",), (rows, columns // 8))
        scale = StoredTensor(name, ("BF16", "F32", "F16"), scales)
        return Stored(module, scheme, shape, {"codes": codes, "scale": scale}, INT32, (f"{module}.weight_shape",))

    def beside(self, matrix: Matrix) -> dict[str, Tensor]:
        if matrix.weight.grid.kind != "int" or matrix.weight.grid.bits != 4:
            return {}
        return {f"{matrix.module}.weight_shape": torch.tensor(matrix.weight.codes.shape)}

    def config(self, cfg: ModelConfig, schemes: Schemes) -> dict[str, Any]:
        patterns = target_patterns(schemes)
        groups: dict[str, Any] = {}
        for idx, (scheme, names) in enumerate(patterns.items()):
            weights = _described(scheme.weight, dynamic=False)
            groups[f"group_{idx}"] = {
                # Engines that look for one scheme of the whole model look for it under this name.
                "targets": [CLASS] if len(patterns) == 1 else names,
                _WEIGHTS: weights,
                _ACTS: None if scheme.act is None else _described(scheme.act, dynamic=True),
                "output_activations": None,
                "format": _FORMATS[weights["type"], weights["num_bits"]],
            }
        formats = {group["format"] for group in groups.values()}
        return {
            "config_groups": groups,
            "quant_method": self.name,
            "kv_cache_scheme": None,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": ignored_patterns(cfg, schemes),
            "version": VERSION,
            "sparsity_config": {},
            "transform_config": {},
        }

    def schemes(
        self, config: Mapping[str, Any], modules: list[str], entries: Mapping[str, TensorEntry]
    ) -> dict[str, Scheme]:
        if held := config.get("kv_cache_scheme"):
            raise refuse("quantization_config.kv_cache_scheme", held, "null; --kv-cache-dtype sets it")
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise refuse("quantization_config.config_groups", groups, "groups of targets with weights")
        targets: dict[str, Scheme] = {}
        for name, group in groups.items():
            scheme = _scheme(f"quantization_config.config_groups.{name}", group, config.get("format"))
            targets |= {target: scheme for target in group["targets"] if target not in targets}
        kept = config.get("ignore") or []
        if not _are_texts(kept):
            raise refuse("quantization_config.ignore", kept, "a list of names and patterns")
        find, is_kept = lookup(targets), lookup(dict.fromkeys(kept, True))
        found = {module: find(module) for module in modules if not is_kept(module)}
        return {module: scheme for module, scheme in found.items() if scheme is not None}


def two_level_scale(scale: Tensor) -> Tensor:
    """Group scales [..., O, G], rounded so that vLLM's conversion finds them again: e4m3 times a float32 a row.

    The conversion divides a row by its largest scale / 448, rounds to e4m3, and divides that by 8. What is stored is
    such a product in bfloat16, within 2^-9 of it: dividing again ends at the same e4m3 number.
    """
    top = scale.amax(-1, keepdim=True).to(torch.bfloat16).to(scale.dtype).clamp_min(torch.finfo(torch.bfloat16).tiny)
    factor = top / 448
    held = (scale / factor).clamp(_LEAST, 448).to(FP8).to(scale.dtype)
    return exact_bf16(held * factor)


def _described(grid: Grid, *, dynamic: bool) -> dict[str, Any]:
    held: dict[str, Any] = {
        "num_bits": grid.bits,
        "type": "int" if grid.kind == "int" else "float",
        "symmetric": grid.symmetric,
        "group_size": grid.group if grid.scope == "group" else None,
        "strategy": "tensor_group" if grid.kind == "nvfp4" else grid.scope,
        "dynamic": dynamic,
    }
    if grid.kind == "nvfp4":
        held["scale_dtype"] = "torch.float8_e4m3fn"
    return held | ({"block_structure": [grid.group, grid.group]} if grid.scope == "block" else {})


def _grid(where: str, held: Mapping[str, Any]) -> Grid:
    """The inverse of `_described`."""
    strategy, group = held.get("strategy"), held.get("group_size")
    if (held["type"], held["num_bits"]) == ("float", 4):
        if (strategy, group) != ("tensor_group", NVFP4_GROUP.group):
            raise refuse(f"{where}.strategy", f"{strategy} of {group}", "tensor_group of 16, which is nvfp4")
        return NVFP4_GROUP
    if strategy == "block":
        structure = held.get("block_structure")
        if structure != [128, 128]:
            raise refuse(f"{where}.block_structure", structure, "[128, 128]")
        group = 128
    if strategy not in ("channel", "group", "token", "block", "tensor"):
        raise refuse(f"{where}.strategy", strategy, "channel, group, token or block")
    kind = "fp8" if held["type"] == "float" else "int"
    scoped = group if strategy in ("group", "block") else None
    return Grid(kind, held["num_bits"], strategy, scoped, bool(held.get("symmetric", True)))


def _scheme(where: str, group: Any, outer: Any) -> Scheme:
    """Of one of the config's groups."""
    try:
        weights, acts, patterns = group[_WEIGHTS], group.get(_ACTS), group["targets"]
        kind = weights["type"], weights["num_bits"]
    except (KeyError, TypeError, AttributeError):
        raise refuse(where, group, "targets, weights and input_activations") from None
    if kind not in _FORMATS:
        allowed = "int 4, int 8, float 8, or float 4 in groups of 16"
        raise refuse(f"{where}.{_WEIGHTS}", f"{kind[0]} {kind[1]}", allowed)
    stored = group.get("format") or outer
    if stored != _FORMATS[kind]:
        raise refuse(f"{where}.format", stored, f"{_FORMATS[kind]} for {kind[0]} {kind[1]}")
    if not _are_texts(patterns) or group.get("output_activations"):
        raise refuse(where, group, "a list of targets, and no output_activations")
    if kind == ("float", 4):
        acts = None  # which are in 16 bits here, whatever the file says
    if acts is not None and not acts.get("dynamic"):
        raise refuse(f"{where}.{_ACTS}.dynamic", acts.get("dynamic"), "true: scales of tokens are not stored")
    return Scheme(_grid(f"{where}.{_WEIGHTS}", weights), None if acts is None else _grid(f"{where}.{_ACTS}", acts))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
