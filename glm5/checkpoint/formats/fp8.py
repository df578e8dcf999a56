"""Formats around e4m3: the published FP8 layout, and SGLang's w4afp8 that puts int4 experts into it.

native    weight e4m3 [O, I], weight_scale_inv float32 [O / 128, I / 128]
w4afp8    experts: weight int8 bytes [O, I / 2], even input in the low half; weight_scale_inv float32 [O, I / 128],
          exact in bfloat16, as SGLang computes with that; input_scale float32 [1] = largest input / 448
"""

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.formats.base import Format, Matrix, Schemes, Stored, StoredTensor, exact_bf16, scheme_name
from glm5.checkpoint.formats.packing import PAIRS
from glm5.checkpoint.names import EXPERT, SCALE_SUFFIX, STACK, place_of
from glm5.checkpoint.shard import TensorEntry
from glm5.config.model import ModelConfig
from glm5.config.quantize import Target
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import BLOCK, FP8_MAX
from glm5.quant.record import FP8_BLOCK, INT4_GROUP, W4A8_FP8, Scheme


class NativeFp8(Format):
    """What zai-org's FP8 checkpoints are, and what every engine loads."""

    name = "fp8"
    targets = ("glm5", "vllm", "sglang")

    def supports(self, schemes: Set[Scheme]) -> bool:
        return all(scheme.weight == FP8_BLOCK for scheme in schemes)

    def refusal(self, module: str, scheme: Scheme, target: Target) -> str | None:
        is_block = scheme.weight == FP8_BLOCK
        return None if is_block else f"native FP8 holds blocks of 128x128, not {scheme_name(scheme)}"

    def layout(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
        codes = StoredTensor(f"{module}.weight", ("F8_E4M3",), shape)
        scale = StoredTensor(f"{module}.weight{SCALE_SUFFIX}", ("F32",), scheme.weight.scale_shape(shape))
        return Stored(module, scheme, shape, {"codes": codes, "scale": scale})

    def config(self, cfg: ModelConfig, schemes: Schemes) -> dict[str, Any]:
        return fp8_config(
            spec.name
            for spec in tensor_specs(cfg)
            for place in [place_of(spec.name)]
            if place.name.removesuffix(".weight") not in schemes.get(place.layer_idx, {})
        )

    def schemes(
        self, config: Mapping[str, Any], modules: list[str], entries: Mapping[str, TensorEntry]
    ) -> dict[str, Scheme]:
        return {}


class W4aFp8(NativeFp8):
    """SGLang's; `quantization_config` names the method and nothing else, as the rest is fixed."""

    name = "w4afp8"
    targets = ("sglang",)

    def supports(self, schemes: Set[Scheme]) -> bool:
        return any(scheme.weight.kind == "int" and scheme.weight.bits == 4 and scheme.act for scheme in schemes)

    def refusal(self, module: str, scheme: Scheme, target: Target) -> str | None:
        if module.startswith(STACK):
            fits = scheme.weight == INT4_GROUP and scheme.act is not None and scheme.act.kind == "fp8"
            return None if fits else f"w4afp8 holds experts as w4a8-g128-fp8, not {scheme_name(scheme)}"
        return super().refusal(module, scheme, target)

    def stored_scale(self, scale: Tensor, scheme: Scheme) -> Tensor:
        return exact_bf16(scale) if scheme.weight.bits == 4 else scale

    def layout(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
        """The static scale of inputs is not read: scales of tokens are found as they come, which is nearer."""
        if scheme.weight.bits != 4:
            return super().layout(module, scheme, shape)
        codes = StoredTensor(f"{module}.weight", ("I8", "U8"), (shape[0], shape[1] // 2))
        scales = scheme.weight.scale_shape(shape)
        scale = StoredTensor(f"{module}.weight{SCALE_SUFFIX}", ("F32", "BF16", "F16"), scales)
        return Stored(module, scheme, shape, {"codes": codes, "scale": scale}, PAIRS, (f"{module}.input_scale",))

    def beside(self, matrix: Matrix) -> dict[str, Tensor]:
        if matrix.weight.grid.bits != 4:
            return {}
        return {f"{matrix.module}.input_scale": torch.tensor([(matrix.input_amax or FP8_MAX) / FP8_MAX])}

    def config(self, cfg: ModelConfig, schemes: Schemes) -> dict[str, Any]:
        return {"quant_method": self.name}

    def schemes(
        self, config: Mapping[str, Any], modules: list[str], entries: Mapping[str, TensorEntry]
    ) -> dict[str, Scheme]:
        """The config says nothing: `entries` tell; without them all experts are int4."""

        def is_int4(module: str) -> bool:
            entry = entries.get(f"{module}.weight")
            return entry is None or entry.dtype in ("I8", "U8")

        return {module: W4A8_FP8 for module in modules if EXPERT.search(module) and is_int4(module)}


def fp8_config(kept: Iterable[str]) -> dict[str, Any]:
    """Of native FP8, where the tensors `kept` are not quantized."""
    return {
        "quant_method": NativeFp8.name,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in kept),
    }
