"""glm5's own layout: the record as it is, so that nothing is lost.

    <module>.weight         int8 [O, I]; two 4-bit codes a byte, uint8 [O, I / 2], even in the low half; e4m3
    <module>.weight_scale   float32 of the grid; nvfp4: e4m3
    <module>.weight_offset  float32, of asymmetric grids       <module>.weight_scale_2   float32 [1], of nvfp4

quantization_config says the grids of weight and input of every module; a stack of experts is one entry.
"""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from glm5.kernels.block_scaled import FP8
from glm5.quant.record import Grid, Quantized, Scheme
from glm5.quantize.formats.base import Extras, Fetch, Matrix, scheme_name
from glm5.quantize.formats.packing import pack_pairs, unpack_pairs
from glm5.quantize.plan import Plan

VERSION = 1


class Own:
    """See the module's first lines."""

    name = "glm5"
    shard_prefix = "model"

    def refusal(self, module: str, scheme: Scheme) -> str | None:
        return None

    def stored_scale(self, scale: Tensor, grid: Grid) -> Tensor:
        return scale

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        module, weight = matrix.module, matrix.weight
        packs = weight.grid.bits == 4
        scale = weight.scale.to(FP8) if weight.grid.kind == "nvfp4" else weight.scale.float()
        found = {
            f"{module}.weight": pack_pairs(weight.codes) if packs else weight.codes,
            f"{module}.weight_scale": scale,
        }
        if weight.offset is not None:
            found[f"{module}.weight_offset"] = weight.offset.float()
        if weight.tensor_scale is not None:
            found[f"{module}.weight_scale_2"] = weight.tensor_scale.float().reshape(1)
        return found

    def read(self, module: str, scheme: Scheme, fetch: Fetch) -> Quantized:
        grid, codes = scheme.weight, fetch(f"{module}.weight")
        if grid.bits == 4:
            codes = unpack_pairs(codes, signed=grid.kind == "int")
        return Quantized(
            grid,
            codes,
            fetch(f"{module}.weight_scale").float(),
            None if grid.symmetric else fetch(f"{module}.weight_offset"),
            fetch(f"{module}.weight_scale_2").reshape(1, 1) if grid.kind == "nvfp4" else None,
        ).check()

    def config(self, plan: Plan) -> dict[str, Any]:
        schemes: dict[str, Scheme] = {}
        modules: dict[str, str] = {}
        for layer_idx, linears in plan.linears.items():
            for module, linear in linears.items():
                name = scheme_name(linear.scheme)
                schemes[name] = linear.scheme
                modules[f"model.layers.{layer_idx}.{module}"] = name
        described = {
            name: {"weight": asdict(scheme.weight), "input": asdict(scheme.act) if scheme.act else None}
            for name, scheme in schemes.items()
        }
        return {"quant_method": "glm5", "version": VERSION, "schemes": described, "modules": modules}

    def extras(self, plan: Plan, stored: dict[str, str]) -> Extras:
        return Extras()


def parse_config(config: dict[str, Any]) -> dict[str, Scheme]:
    """Scheme by module from `quantization_config`, as `config` wrote it."""
    schemes = {
        name: Scheme(Grid(**each["weight"]), Grid(**each["input"]) if each["input"] else None)
        for name, each in config["schemes"].items()
    }
    return {module: schemes[name] for module, name in config["modules"].items()}


def as_signed(packed: Tensor) -> Tensor:
    """The same bytes as int8, as some readers declare them."""
    return packed.view(torch.int8)
