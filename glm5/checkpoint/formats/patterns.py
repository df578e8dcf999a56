"""Which modules a config's patterns name: short lists that say exactly which scheme each module has.

A leaf is a module within its layer; of experts it stands for all of them. A leaf that is the same in all layers of a
model needs one pattern, one that differs names its layers. Engines ask for some modules under names of their own: those
they merge (`names.MERGED`), and in SGLang those of the MTP layer. Rules differ in whether they translate such a name
into its parts, so the lists have both.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from glm5.checkpoint.formats.base import Schemes
from glm5.checkpoint.names import MERGED, OUTER, STACK, place_of
from glm5.config.model import ModelConfig
from glm5.config.refusal import refuse
from glm5.config.tensors import tensor_specs
from glm5.quant.record import Scheme

V = TypeVar("V")
CLASS = "Linear"
"""Of all modules here, as a pattern."""
# Rules of regular expressions ask for the experts of a stack one by one, those of globs for the stack.
_MERGED_LINEAR = {leaf: parts for leaf, parts in MERGED.items() if not parts[0].startswith(STACK)}


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
        merged = {leaf: layer[parts[0]] for leaf, parts in _MERGED_LINEAR.items() if parts[0] in layer}
        for leaf, scheme in {**layer, **merged}.items():
            by_leaf.setdefault(leaf, {}).setdefault(scheme, []).append(layer_idx)
    found: dict[Scheme, list[str]] = {}
    for leaf, by_scheme in by_leaf.items():
        for scheme, layers in by_scheme.items():
            found.setdefault(scheme, []).append(_pattern(leaf, None if len(by_scheme) == 1 else layers))
    return found


def ignored_patterns(cfg: ModelConfig, schemes: Schemes) -> list[str]:
    """Patterns for every linear module that stays as it is."""
    found = ["lm_head", *(_pattern(leaf, layers) for leaf, layers in _kept(cfg, schemes, _MERGED_LINEAR).items())]
    found += [rf"re:.*layers\.{layer_idx}\..*" for layer_idx in _whole(cfg, schemes)]
    return found + ([r"re:model\.decoder\..*"] if cfg.num_hidden_layers in _whole(cfg, schemes) else [])


def ignored_globs(cfg: ModelConfig, schemes: Schemes) -> list[str]:
    """The same as globs, which have no alternatives: `*mlp.gate`. SGLang asks them for a head of the MTP layer, too."""
    found = ["lm_head"]
    for leaf, layers in _kept(cfg, schemes, MERGED).items():
        found += [f"*layers.*.{leaf}"] if layers is None else [f"*layers.{layer_idx}.{leaf}" for layer_idx in layers]
    found += [f"*layers.{layer_idx}.*" for layer_idx in _whole(cfg, schemes)]
    if cfg.num_nextn_predict_layers:
        found.append("*shared_head.*")
    return found + (["model.decoder.*"] if cfg.num_hidden_layers in _whole(cfg, schemes) else [])


def _kept(cfg: ModelConfig, schemes: Schemes, merged: Mapping[str, tuple[str, ...]]) -> dict[str, list[int] | None]:
    """Leaves that stay as they are, those of `merged` too, in which of the layers where others do not; None: in all."""
    modules = linear_modules(cfg)
    partly = [layer_idx for layer_idx in modules if layer_idx in schemes]
    kept: dict[str, list[int]] = {}
    changed: set[str] = set()
    for layer_idx in partly:
        names = {leaf: leaf for leaf in modules[layer_idx]}
        names |= {leaf: parts[0] for leaf, parts in merged.items() if parts[0] in names}
        for leaf, part in names.items():
            if part in schemes[layer_idx]:
                changed.add(leaf)
            else:
                kept.setdefault(leaf, []).append(layer_idx)
    return {leaf: layers if leaf in changed else None for leaf, layers in kept.items()}


def _whole(cfg: ModelConfig, schemes: Schemes) -> list[int]:
    """Layers that stay as they are."""
    return sorted(linear_modules(cfg).keys() - schemes.keys() - {OUTER})


def lookup(patterns: Mapping[str, V]) -> Callable[[str], V | None]:
    """What a module's pattern stands for, as compressed-tensors matches: its whole name, else the first of the `re:`
    patterns that fits from the start, else the class. ConfigError for a pattern that is no regular expression."""
    compiled: list[tuple[re.Pattern[str], V]] = []
    for pattern, value in patterns.items():
        if pattern.startswith("re:"):
            try:
                compiled.append((re.compile(pattern[3:]), value))
            except re.error as error:
                raise refuse("quantization_config", pattern, f"regular expressions: {error}") from None

    def find(module: str) -> V | None:
        if module in patterns:
            return patterns[module]
        return next((value for regex, value in compiled if regex.match(module)), patterns.get(CLASS))

    return find


def _pattern(leaf: str, layers: list[int] | None) -> str:
    """For a leaf of some layers; None: of all."""
    where = ".*" if layers is None else rf".*layers\.({'|'.join(map(str, sorted(layers)))})\."
    if leaf.startswith(STACK):
        return rf"re:{where}mlp\.experts\.\d+\.{re.escape(leaf.removeprefix(STACK))}$"
    # transformers takes the first group with a pattern that contains "experts" for that of the routed ones.
    return rf"re:{where}{re.escape(leaf).replace('experts', 'expert[s]')}$"
