"""Formats of quantized checkpoints: one file each, which writes and reads it. FORMATS is the list of them.

glm5         glm5's own layout              compressed   compressed-tensors: vLLM, SGLang, transformers
fp8          native FP8, w4afp8             modelopt     NVFP4: vLLM, SGLang
ascend       AscendV1                       gguf         GGUF: llama.cpp
packing      4-bit values in bytes          patterns     names of modules
"""

from collections.abc import Mapping
from types import MappingProxyType

from glm5.checkpoint.formats.ascend import AscendV1
from glm5.checkpoint.formats.base import Format, Schemes, Stored, scheme_name
from glm5.checkpoint.formats.compressed import CompressedTensors
from glm5.checkpoint.formats.fp8 import NativeFp8, W4aFp8
from glm5.checkpoint.formats.gguf import Gguf
from glm5.checkpoint.formats.glm5 import Glm5Format
from glm5.checkpoint.formats.modelopt import ModelOpt
from glm5.checkpoint.shard import TensorEntry
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.quantize import Target
from glm5.config.refusal import refuse
from glm5.config.tensors import tensor_specs

FORMATS: tuple[Format, ...] = (NativeFp8(), ModelOpt(), W4aFp8(), AscendV1(), CompressedTensors(), Gguf(), Glm5Format())
"""A plan is written in the first that its target loads and that suits its schemes."""
# Matrices that no engine computes as a linear layer of its own.
_NO_LINEAR = ("model.embed_tokens", ".mlp.gate")


def choose(target: Target, schemes: Schemes) -> Format:
    """The format that a target reads. ConfigError names the first module that it cannot hold."""
    held = {(module, scheme) for layer in schemes.values() for module, scheme in layer.items()}
    every = {scheme for _, scheme in held}
    chosen = next(each for each in FORMATS if target in each.targets and each.supports(every))
    for module, scheme in sorted(held, key=str):
        if why := chosen.refusal(module, scheme, target):
            raise ConfigError(f"--target {target}: {module} as {scheme_name(scheme)}: {why}")
    return chosen


def format_of(cfg: ModelConfig) -> Format | None:
    """The format that `quant_method` names; None where nothing is quantized. ConfigError for one that this engine does
    not load."""
    config = cfg.quantization_config
    if config is None:
        return None
    method = config.get("quant_method")
    if method is None and "weight_block_size" in config:
        method = NativeFp8.name
    loaded = {each.name: each for each in FORMATS if each.is_loaded}
    if method not in loaded:
        raise refuse("quantization_config.quant_method", method, " or ".join(loaded))
    return loaded[method]


def stored_of(cfg: ModelConfig, entries: Mapping[str, TensorEntry] = MappingProxyType({})) -> dict[str, Stored]:
    """The quantized matrices that `cfg` speaks of, by the weight's name, without native FP8, whose tensors speak for
    themselves (fit.py). `entries`: the tensors found, where any are known.

    Raises ConfigError for what the config gets wrong, and for what this engine has no reading of.
    """
    chosen, found = format_of(cfg), dict[str, Stored]()
    if chosen is None:
        return found
    shapes = {
        spec.name.removesuffix(".weight"): (spec.shape[0], spec.shape[1])
        for spec in tensor_specs(cfg)
        if len(spec.shape) == 2 and not spec.name.removesuffix(".weight").endswith(_NO_LINEAR)
    }
    schemes = chosen.schemes(cfg.quantization_config or {}, list(shapes), entries)
    for module, shape in shapes.items():
        if module in schemes:
            try:
                found[f"{module}.weight"] = chosen.layout(module, schemes[module], shape)
            except ConfigError as error:
                raise ConfigError(f"quantization_config: {module}: {error}") from None
    return found
