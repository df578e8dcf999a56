"""Which modules a config's patterns name: short lists that say exactly which scheme each module has.

A leaf is a module within its layer; of experts it stands for all of them. A leaf that is the same in all layers of a
model needs one pattern, one that differs names its layers.
"""

import re
from collections.abc import Iterable

from glm5.checkpoint.formats.base import Schemes
from glm5.checkpoint.names import OUTER, STACK, place_of
from glm5.config.model import ModelConfig
from glm5.config.tensors import tensor_specs
from glm5.quant.record import Scheme


def linear_modules(cfg: ModelConfig) -> dict[int, list[str]]:
    """Every linear module of each layer, quantized or not; OUTER: the head."""
    found: dict[int, list[str]] = {OUTER: ["lm_head"]}
    for spec in tensor_specs(cfg):
        place = place_of(spec.name)
        if place.layer_idx != OUTER and len(spec.shape) == 2 and not place.expert:
            found.setdefault(place.layer_idx, []).append(place.name.removesuffix(".weight"))
    return found


def target_patterns(schemes: Schemes) -> dict[Scheme, list[str]]:
    """Patterns by scheme, to be read with `ignored_patterns`, which wins: `re:.*self_attn\\.o_proj$`."""
    by_leaf: dict[str, dict[Scheme, list[int]]] = {}
    for layer_idx, layer in schemes.items():
        for module, scheme in layer.items():
            by_leaf.setdefault(module, {}).setdefault(scheme, []).append(layer_idx)
    found: dict[Scheme, list[str]] = {}
    for leaf, by_scheme in by_leaf.items():
        for scheme, layers in by_scheme.items():
            where = ".*" if len(by_scheme) == 1 else rf".*layers\.({'|'.join(map(str, sorted(layers)))})\."
            found.setdefault(scheme, []).append(f"re:{where}{_leaf_pattern(leaf)}$")
    return found


def ignored_patterns(cfg: ModelConfig, schemes: Schemes) -> list[str]:
    """Patterns for every linear module that stays as it is; modules by the names they have before engines merge any."""
    modules = linear_modules(cfg)
    partly = [i for i in modules if i in schemes]
    kept: dict[str, list[int]] = {}
    for layer_idx in partly:
        for leaf in modules[layer_idx]:
            if leaf not in schemes[layer_idx]:
                kept.setdefault(leaf, []).append(layer_idx)
    found = ["lm_head"]
    for leaf, layers in kept.items():
        everywhere = not any(leaf in schemes[i] for i in partly)
        where = ".*" if everywhere else rf".*layers\.({'|'.join(map(str, sorted(layers)))})\."
        found.append(f"re:{where}{_leaf_pattern(leaf)}$")
    return found + [rf"re:.*layers\.{i}\..*" for i in sorted(modules.keys() - schemes.keys() - {OUTER})]


def ignored_globs(cfg: ModelConfig, schemes: Schemes) -> list[str]:
    """The same as globs, which have no alternatives: `*mlp.gate`."""
    modules = linear_modules(cfg)
    partly = [i for i in modules if i in schemes]
    found = ["lm_head"]
    for leaf in dict.fromkeys(leaf for i in partly for leaf in modules[i]):
        without = [i for i in partly if leaf in modules[i] and leaf not in schemes[i]]
        if without and not any(leaf in schemes[i] for i in partly):
            found.append(f"*layers.*.{leaf}")
        else:
            found.extend(f"*layers.{i}.{leaf}" for i in without)
    return found + [f"*layers.{i}.*" for i in modules if i != OUTER and i not in schemes]


def matches(patterns: Iterable[str], module: str) -> bool:
    """As compressed-tensors matches: `re:` from the start, a class (all here are Linear), or a whole name."""
    return any(re.match(p[3:], module) if p.startswith("re:") else p in ("Linear", module) for p in patterns)


def _leaf_pattern(leaf: str) -> str:
    if leaf.startswith(STACK):
        return rf"mlp\.experts\.\d+\.{re.escape(leaf.removeprefix(STACK))}"
    return re.escape(leaf).replace(r"\_", "_")
