"""ModelOpt's NVFP4: scales are multipliers.

weight uint8 [O, I / 2], even input in the low half     weight_scale e4m3 [O, I / 16]
weight_scale_2 float32 = largest weight / (6 * 448)     input_scale float32 = largest input / (6 * 448)
"""

from typing import Any

import torch
from torch import Tensor

from glm5.kernels.block_scaled import FP8, FP8_MAX
from glm5.quant.record import E2M1, Grid, Quantized, Scheme
from glm5.quantize.formats.base import Extras, Fetch, Matrix, scheme_name
from glm5.quantize.formats.packing import pack_pairs, unpack_pairs
from glm5.quantize.formats.targets import ignored_globs
from glm5.quantize.plan import Plan


class ModelOpt:
    """What nvidia's NVFP4 checkpoints are; vLLM and SGLang load it, on Hopper with 16-bit activations."""

    name = "modelopt"
    shard_prefix = "model"

    def refusal(self, module: str, scheme: Scheme) -> str | None:
        return None if scheme.weight.kind == "nvfp4" else f"ModelOpt's NVFP4 holds no {scheme_name(scheme)}"

    def stored_scale(self, scale: Tensor, grid: Grid) -> Tensor:
        return scale

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        module, weight = matrix.module, matrix.weight
        assert weight.tensor_scale is not None, f"{weight.grid=}"
        reach = E2M1[-1] * FP8_MAX
        return {
            f"{module}.weight": pack_pairs(weight.codes),
            f"{module}.weight_scale": weight.scale.to(FP8),
            f"{module}.weight_scale_2": weight.tensor_scale.float().reshape(()),
            f"{module}.input_scale": torch.tensor((matrix.input_amax or reach) / reach),
        }

    def read(self, module: str, scheme: Scheme, fetch: Fetch) -> Quantized:
        codes = unpack_pairs(fetch(f"{module}.weight"), signed=False)
        whole = fetch(f"{module}.weight_scale_2").reshape(1, 1)
        return Quantized(scheme.weight, codes, fetch(f"{module}.weight_scale").float(), tensor_scale=whole).check()

    def config(self, plan: Plan) -> dict[str, Any]:
        shared = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
        return {"quant_method": "modelopt", **shared, "ignore": ignored_globs(plan)}

    def extras(self, plan: Plan, stored: dict[str, str]) -> Extras:
        shared = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
        quantization = {**shared, "exclude_modules": ignored_globs(plan)}
        return Extras({"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": quantization}})
