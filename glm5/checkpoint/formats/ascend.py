"""AscendV1, msModelSlim's own: what vLLM-Ascend and SGLang on NPUs load.

    W8A8_DYNAMIC   weight int8 [O, I]            weight_scale float32 [O, 1]    weight_offset zeros [O, 1]
    W4A8_DYNAMIC   weight int8 [O / 2, I]: the values of two neighbouring outputs a byte, even in the low half
                   weight_scale, weight_offset as above
                   scale_bias    gate, up [O, 1] = 8 sum_k s q_k       down [O, 16]: sums over sixteenths of the inputs

The kernel splits an int8 input as 16 high + low + 8 with signed halves, so 8 sum w must be added back: scale_bias; in
sixteen parts where tensor parallelism may cut the inputs. quant_model_description.json names every tensor's type.
"""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.formats.base import Format, Matrix, Schemes, Stored, StoredTensor, scheme_name
from glm5.checkpoint.formats.packing import ROWS, UNPACKED
from glm5.checkpoint.names import STACK
from glm5.config.model import ModelConfig
from glm5.config.quantize import Target
from glm5.quant.record import INT4_CHANNEL, INT8_CHANNEL, INT8_TOKEN, Scheme

DESCRIPTION = "quant_model_description.json"
SLICES = 16
_TYPES = {"w8a8": "W8A8_DYNAMIC", "w4a8": "W4A8_DYNAMIC", "": "FLOAT"}


class AscendV1(Format):
    """See the module's first lines. config.json carries no quantization_config."""

    name = "ascend-v1"
    targets = ("ascend",)
    is_loaded = False
    shard_prefix = "quant_model_weights"

    def supports(self, schemes: Set[Scheme]) -> bool:
        return any(scheme.act is not None for scheme in schemes)

    def refusal(self, module: str, scheme: Scheme, target: Target) -> str | None:
        if scheme.act == INT8_TOKEN and scheme.weight == INT8_CHANNEL:
            return None
        if scheme.act == INT8_TOKEN and scheme.weight == INT4_CHANNEL:
            return None if module.startswith(STACK) else "W4A8_DYNAMIC is for routed experts"
        return f"AscendV1 holds int8 and int4 per channel under int8 tokens, not {scheme_name(scheme)}"

    def layout(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
        is_int4, (rows, columns) = scheme.weight.bits == 4, shape
        codes = StoredTensor(f"{module}.weight", ("I8",), (rows // 2 if is_int4 else rows, columns))
        scale = StoredTensor(f"{module}.weight_scale", ("F32",), (rows, 1))
        beside = (f"{module}.weight_offset", *([f"{module}.scale_bias"] if is_int4 else []))
        packing = ROWS if is_int4 else UNPACKED
        return Stored(module, scheme, shape, {"codes": codes, "scale": scale}, packing, beside)

    def beside(self, matrix: Matrix) -> dict[str, Tensor]:
        module, weight, scale = matrix.module, matrix.weight, matrix.weight.scale.float()
        found = {f"{module}.weight_offset": torch.zeros_like(scale)}
        if weight.grid.bits == 4:
            slices = SLICES if module.endswith("down_proj") else 1
            found[f"{module}.scale_bias"] = scale_bias(weight.codes, scale, slices)
        return found

    def config(self, cfg: ModelConfig, schemes: Schemes) -> None:
        return None

    def files(self, cfg: ModelConfig, schemes: Schemes, stored: Mapping[str, str]) -> dict[str, Any]:
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
        return {DESCRIPTION: described}


def scale_bias(codes: Tensor, scale: Tensor, slices: int) -> Tensor:
    """8 sum_k s q_k over each of `slices` equal parts of the inputs: float32 [O, slices]."""
    sums = codes.unflatten(-1, (slices, -1)).sum(-1, dtype=torch.int32)
    return 8 * sums.float() * scale
