"""Formats around e4m3: the published FP8 layout, and SGLang's w4afp8 that puts int4 experts into it.

native    weight e4m3 [O, I], weight_scale_inv float32 [O / 128, I / 128]
w4afp8    experts: weight int8 bytes [O, I / 2], even input in the low half; weight_scale_inv float32 [O, I / 128],
          exact in bfloat16, as SGLang computes with that; input_scale float32 [1] = largest input / 448
"""

from typing import Any

import torch
from torch import Tensor

from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import BLOCK, FP8_MAX
from glm5.quant.record import Grid, Quantized, Scheme
from glm5.quantize.formats.base import Extras, Fetch, Matrix, exact_bf16, needs_int4_g128, scheme_name
from glm5.quantize.formats.packing import pack_pairs, unpack_pairs
from glm5.quantize.plan import Plan
from glm5.quantize.source import STACK, place_of


class NativeFp8:
    """What zai-org's FP8 checkpoints are, and what every engine loads."""

    name = "fp8"
    shard_prefix = "model"

    def refusal(self, module: str, scheme: Scheme) -> str | None:
        return None if is_block(scheme) else f"native FP8 holds blocks of 128x128, not {scheme_name(scheme)}"

    def stored_scale(self, scale: Tensor, grid: Grid) -> Tensor:
        return scale

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        name = f"{matrix.module}.weight"
        return {name: matrix.weight.codes, f"{name}_scale_inv": matrix.weight.scale.float()}

    def read(self, module: str, scheme: Scheme, fetch: Fetch) -> Quantized:
        name = f"{module}.weight"
        return Quantized(scheme.weight, fetch(name), fetch(f"{name}_scale_inv")).check()

    def config(self, plan: Plan) -> dict[str, Any]:
        kept = sorted(
            spec.name.removesuffix(".weight")
            for spec in tensor_specs(plan.cfg)
            for place in [place_of(spec.name)]
            if place.name.removesuffix(".weight") not in plan.layer(place.layer_idx)
        )
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }

    def extras(self, plan: Plan, stored: dict[str, str]) -> Extras:
        return Extras()


class W4aFp8(NativeFp8):
    """SGLang's; `quantization_config` names the method and nothing else, as the rest is fixed."""

    name = "w4afp8"

    def refusal(self, module: str, scheme: Scheme) -> str | None:
        if module.startswith(STACK):
            fits = needs_int4_g128(scheme) and scheme.act is not None and scheme.act.kind == "fp8"
            return None if fits else f"w4afp8 holds experts as w4a8-g128-fp8, not {scheme_name(scheme)}"
        return super().refusal(module, scheme)

    def stored_scale(self, scale: Tensor, grid: Grid) -> Tensor:
        return exact_bf16(scale) if grid.bits == 4 else scale

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        if matrix.weight.grid.bits != 4:
            return super().tensors(matrix)
        module, weight = matrix.module, matrix.weight
        reach = FP8_MAX if not matrix.input_amax else matrix.input_amax
        return {
            f"{module}.weight": pack_pairs(weight.codes).view(torch.int8),
            f"{module}.weight_scale_inv": weight.scale.float(),
            f"{module}.input_scale": torch.tensor([reach / FP8_MAX]),
        }

    def read(self, module: str, scheme: Scheme, fetch: Fetch) -> Quantized:
        if scheme.weight.bits != 4:
            return super().read(module, scheme, fetch)
        codes = unpack_pairs(fetch(f"{module}.weight"))
        return Quantized(scheme.weight, codes, fetch(f"{module}.weight_scale_inv")).check()

    def config(self, plan: Plan) -> dict[str, Any]:
        return {"quant_method": "w4afp8"}


def is_block(scheme: Scheme) -> bool:
    """e4m3 weights in blocks of 128 under groups of 128 inputs."""
    return (scheme.weight.kind, scheme.weight.scope, scheme.weight.group) == ("fp8", "block", BLOCK)
