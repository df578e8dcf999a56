"""glm5's own layout: quantized tensors as they are, so that nothing is lost.

    <module>.weight         int8 [O, I]; two 4-bit values a byte, uint8 [O, I / 2], even in the low half; e4m3
    <module>.weight_scale   float32 of the grid; nvfp4: e4m3
    <module>.weight_offset  float32, of asymmetric grids       <module>.weight_scale_2   float32 [1], of nvfp4

quantization_config says the grids of weight and input of every module; a stack of experts is one entry.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from glm5.checkpoint.formats.base import ON_DISK, Format, Role, Schemes, Stored, StoredTensor, scheme_name
from glm5.checkpoint.formats.packing import PAIRS, UNPACKED
from glm5.checkpoint.names import EXPERT
from glm5.checkpoint.shard import TensorEntry
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.refusal import refuse
from glm5.quant.record import Grid, Scheme

VERSION = 1


class Glm5Format(Format):
    """See the module's first lines."""

    name = "glm5"
    targets = ("glm5",)

    def layout(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
        grid, packs, is_nvfp4 = scheme.weight, scheme.weight.bits == 4, scheme.weight.kind == "nvfp4"
        scales, dtype = grid.scale_shape(shape), "U8" if packs else ON_DISK[grid.kind]
        parts: dict[Role, StoredTensor] = {
            "codes": StoredTensor(f"{module}.weight", (dtype,), (shape[0], shape[1] // (2 if packs else 1))),
            "scale": StoredTensor(f"{module}.weight_scale", ("F8_E4M3" if is_nvfp4 else "F32",), scales),
        }
        if not grid.symmetric:
            parts["offset"] = StoredTensor(f"{module}.weight_offset", ("F32",), scales)
        if is_nvfp4:
            parts["tensor_scale"] = StoredTensor(f"{module}.weight_scale_2", ("F32",), (1,))
        return Stored(module, scheme, shape, parts, PAIRS if packs else UNPACKED)

    def config(self, cfg: ModelConfig, schemes: Schemes) -> dict[str, Any]:
        by_name = {scheme_name(scheme): scheme for layer in schemes.values() for scheme in layer.values()}
        described = {
            name: {"weight": asdict(scheme.weight), "input": asdict(scheme.act) if scheme.act else None}
            for name, scheme in by_name.items()
        }
        modules = {
            f"model.layers.{layer_idx}.{module}": scheme_name(scheme)
            for layer_idx, layer in schemes.items()
            for module, scheme in layer.items()
        }
        return {"quant_method": self.name, "version": VERSION, "schemes": described, "modules": modules}

    def schemes(
        self, config: Mapping[str, Any], modules: list[str], entries: Mapping[str, TensorEntry]
    ) -> dict[str, Scheme]:
        if config.get("version") != VERSION:
            allowed = f"{VERSION}; a newer glm5 wrote this checkpoint"
            raise refuse("quantization_config.version", config.get("version"), allowed)
        try:
            schemes = {
                name: Scheme(Grid(**each["weight"]), Grid(**each["input"]) if each["input"] else None)
                for name, each in config["schemes"].items()
            }
            named = {module: schemes[name] for module, name in config["modules"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"quantization_config: is damaged: {error!r}; fetch config.json again") from None
        by_module = {module: EXPERT.sub(".experts.*.", module) for module in modules}
        if unknown := sorted(set(named) - set(by_module.values())):
            raise ConfigError(f"quantization_config.modules: {unknown[0]} is no module of this model")
        return {module: named[name] for module, name in by_module.items() if name in named}
