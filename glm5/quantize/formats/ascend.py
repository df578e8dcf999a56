"""AscendV1, msModelSlim's own: what vLLM-Ascend and SGLang on NPUs load.

    W8A8_DYNAMIC   weight int8 [O, I]            weight_scale float32 [O, 1]    weight_offset zeros [O, 1]
    W4A8_DYNAMIC   weight int8 [O / 2, I]: the codes of two neighbouring outputs a byte, even in the low half
                   weight_scale, weight_offset as above
                   scale_bias    gate, up [O, 1] = 8 sum_k s q_k       down [O, 16]: sums over sixteenths of the inputs

The kernel splits an int8 input as 16 high + low + 8 with signed halves, so 8 sum w must be added back: scale_bias; in
sixteen parts where tensor parallelism may cut the inputs. quant_model_description.json names every tensor's type.
"""

from typing import Any

import torch
from torch import Tensor

from glm5.quant.record import INT4_CHANNEL, INT8_CHANNEL, INT8_TOKEN, Grid, Quantized, Scheme
from glm5.quantize.formats.base import Extras, Fetch, Matrix, scheme_name
from glm5.quantize.formats.packing import pack_rows, unpack_rows
from glm5.quantize.plan import Plan
from glm5.quantize.source import STACK

DESCRIPTION = "quant_model_description.json"
SLICES = 16
_TYPES = {"w8a8": "W8A8_DYNAMIC", "w4a8": "W4A8_DYNAMIC", "": "FLOAT"}


class AscendV1:
    """See the module's first lines. config.json carries no quantization_config."""

    name = "ascend-v1"
    shard_prefix = "quant_model_weights"

    def refusal(self, module: str, scheme: Scheme) -> str | None:
        if scheme.act == INT8_TOKEN and scheme.weight == INT8_CHANNEL:
            return None
        if scheme.act == INT8_TOKEN and scheme.weight == INT4_CHANNEL:
            return None if module.startswith(STACK) else "W4A8_DYNAMIC is for routed experts"
        return f"AscendV1 holds int8 and int4 per channel under int8 tokens, not {scheme_name(scheme)}"

    def stored_scale(self, scale: Tensor, grid: Grid) -> Tensor:
        return scale

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        module, weight = matrix.module, matrix.weight
        scale = weight.scale.float()
        found = {f"{module}.weight_scale": scale, f"{module}.weight_offset": torch.zeros_like(scale)}
        if weight.grid.bits == 8:
            return {f"{module}.weight": weight.codes, **found}
        slices = SLICES if module.endswith("down_proj") else 1
        bias = scale_bias(weight.codes, scale, slices)
        return {f"{module}.weight": pack_rows(weight.codes), **found, f"{module}.scale_bias": bias}

    def read(self, module: str, scheme: Scheme, fetch: Fetch) -> Quantized:
        codes = fetch(f"{module}.weight")
        codes = unpack_rows(codes) if scheme.weight.bits == 4 else codes
        return Quantized(scheme.weight, codes, fetch(f"{module}.weight_scale")).check()

    def config(self, plan: Plan) -> dict[str, Any] | None:
        return None

    def extras(self, plan: Plan, stored: dict[str, str]) -> Extras:
        types = {name: _TYPES[scheme] for name, scheme in sorted(stored.items())}
        smallest = min(types.values(), key=lambda kind: ("W4A8_DYNAMIC", "W8A8_DYNAMIC", "FLOAT").index(kind))
        described: dict[str, Any] = {
            "version": "1.0.0",
            "model_quant_type": smallest,
            "group_size": 0,
            "metadata": {},
            "optional": {},
            **types,
        }
        if "rot.weight" in stored:  # what MTP reads has to be multiplied by it
            described["is_rot_used"] = True
        return Extras({DESCRIPTION: described})


def scale_bias(codes: Tensor, scale: Tensor, slices: int) -> Tensor:
    """8 sum_k s q_k over each of `slices` equal parts of the inputs: float32 [O, slices]."""
    sums = codes.unflatten(-1, (slices, -1)).sum(-1, dtype=torch.int32)
    return 8 * sums.float() * scale
