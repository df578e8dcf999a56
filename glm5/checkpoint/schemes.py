"""What a checkpoint's `quantization_config` says: the scheme of every quantized matrix, by module.

    glm5                  this package's own layout: every module's scheme by name
    compressed-tensors    groups of patterns, and patterns of what stays as it is
    w4afp8                SGLang's: experts int4 in groups of 128 under e4m3 tokens, the rest native FP8
    modelopt              NVIDIA's NVFP4: everything that no pattern leaves out
    fp8, none             native FP8, or nothing: tensors speak for themselves (fit.py)

Everything else is refused by its name.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.refusal import refuse
from glm5.config.tensors import tensor_specs
from glm5.quant.record import NVFP4, W4A8_FP8, Grid, Scheme

METHODS = ("glm5", "compressed-tensors", "w4afp8", "modelopt", "fp8")
_FORMATS = {("int", 4): "pack-quantized", ("int", 8): "int-quantized", ("float", 8): "float-quantized"}
_EXPERT = re.compile(r"\.experts\.\d+\.")
# Matrices that no engine computes as a linear layer of its own.
_NO_LINEAR = ("model.embed_tokens", ".mlp.gate")


def method_of(cfg: ModelConfig) -> str | None:
    """The `quant_method`; None where nothing is quantized. ConfigError for one that this engine does not know."""
    config = cfg.quantization_config
    if config is None:
        return None
    method = config.get("quant_method")
    if method is None and "weight_block_size" in config:
        return "fp8"
    if method not in METHODS:
        raise refuse("quantization_config.quant_method", method, " or ".join(METHODS))
    return method


def schemes_of(cfg: ModelConfig) -> dict[str, Scheme]:
    """Schemes by module on disk (`model.layers.3.mlp.experts.7.up_proj`); none for native FP8.

    Raises ConfigError for what the config gets wrong, and for what this engine has no reading of.
    """
    method, config = method_of(cfg), cfg.quantization_config or {}
    modules = [
        spec.name.removesuffix(".weight")
        for spec in tensor_specs(cfg)
        if len(spec.shape) == 2 and not spec.name.removesuffix(".weight").endswith(_NO_LINEAR)
    ]
    if method == "glm5":
        return _own(config, modules)
    if method == "compressed-tensors":
        return _compressed(config, modules)
    if method == "w4afp8":
        return {module: W4A8_FP8 for module in modules if _EXPERT.search(module)}
    return _modelopt(config, modules) if method == "modelopt" else {}


def _own(config: Mapping[str, Any], modules: list[str]) -> dict[str, Scheme]:
    if config.get("version") != 1:
        raise refuse("quantization_config.version", config.get("version"), "1; a newer glm5 wrote this checkpoint")
    try:
        schemes = {
            name: Scheme(Grid(**each["weight"]), Grid(**each["input"]) if each["input"] else None)
            for name, each in config["schemes"].items()
        }
        named = {module: schemes[name] for module, name in config["modules"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"quantization_config: is damaged: {error!r}; fetch config.json again") from None
    by_module = {module: _EXPERT.sub(".experts.*.", module) for module in modules}
    if unknown := sorted(set(named) - set(by_module.values())):
        raise ConfigError(f"quantization_config.modules: {unknown[0]} is no module of this model")
    return {module: named[name] for module, name in by_module.items() if name in named}


def _modelopt(config: Mapping[str, Any], modules: list[str]) -> dict[str, Scheme]:
    """What inputs would be in FP4 stays as it is: Hopper has no product for it, and engines there do the same."""
    for key, allowed in (("quant_algo", "NVFP4"), ("group_size", 16)):
        if config.get(key, 16 if key == "group_size" else None) != allowed:
            raise refuse(f"quantization_config.{key}", config.get(key), str(allowed))
    ignored = config.get("ignore") or config.get("exclude_modules") or []
    return {name: NVFP4 for name in modules if not any(fnmatchcase(name, pattern) for pattern in ignored)}


def _compressed(config: Mapping[str, Any], modules: list[str]) -> dict[str, Scheme]:
    if config.get("kv_cache_scheme"):
        raise refuse("quantization_config.kv_cache_scheme", config["kv_cache_scheme"], "null; --kv-cache-dtype sets it")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise refuse("quantization_config.config_groups", groups, "groups of targets with weights")
    ignored = config.get("ignore") or []
    found: dict[str, Scheme] = {}
    for name, group in groups.items():
        scheme = _scheme(f"quantization_config.config_groups.{name}", group, config.get("format"))
        for module in modules:
            if _matches(group["targets"], module) and not _matches(ignored, module):
                found.setdefault(module, scheme)
    return found


def _scheme(where: str, group: Any, outer: Any) -> Scheme:
    try:
        weights, acts, targets = group["weights"], group.get("input_activations"), group["targets"]
        kind = weights["type"], weights["num_bits"]
    except (KeyError, TypeError, AttributeError):
        raise refuse(where, group, "targets, weights and input_activations") from None
    if kind not in _FORMATS:
        allowed = "int 4, int 8 or float 8 (nvfp4 runs nowhere on this engine)"
        raise refuse(f"{where}.weights", f"{kind[0]} {kind[1]}", allowed)
    stored = group.get("format") or outer
    if stored != _FORMATS[kind]:
        raise refuse(f"{where}.format", stored, f"{_FORMATS[kind]} for {kind[0]} {kind[1]}")
    if not isinstance(targets, list) or group.get("output_activations"):
        raise refuse(where, group, "a list of targets, and no output_activations")
    if acts is not None and not acts.get("dynamic"):
        raise refuse(f"{where}.input_activations.dynamic", acts.get("dynamic"), "true: scales of tokens are not stored")
    return Scheme(
        _grid(f"{where}.weights", weights), None if acts is None else _grid(f"{where}.input_activations", acts)
    )


def _grid(where: str, held: Mapping[str, Any]) -> Grid:
    strategy, group = held.get("strategy"), held.get("group_size")
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


def _matches(patterns: Any, module: str) -> bool:
    """As compressed-tensors matches: `re:` from the start, a class (all here are Linear), or a whole name."""
    return any(
        re.match(pattern[3:], module) is not None
        if pattern.startswith("re:")
        else pattern == "Linear" or pattern == module
        for pattern in patterns
    )
