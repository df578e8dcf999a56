"""Which modules a config's patterns name: short lists that say exactly what a plan says.

A leaf is a module within its layer; of experts it stands for all of them. A leaf that is the same in all layers of a
plan needs one pattern, one that differs names its layers.
"""

import re
from collections.abc import Iterable

from glm5.config.tensors import tensor_specs
from glm5.quant.record import Scheme
from glm5.quantize.plan import Plan
from glm5.quantize.source import OUTER, STACK, place_of


def linear_modules(plan: Plan) -> dict[int, list[str]]:
    """Every linear module of each layer, quantized or not; OUTER: the head."""
    cfg = plan.cfg
    found: dict[int, list[str]] = {OUTER: ["lm_head"]}
    for spec in tensor_specs(cfg):
        place = place_of(spec.name)
        if place.layer_idx != OUTER and len(spec.shape) == 2 and not place.expert:
            found.setdefault(place.layer_idx, []).append(place.name.removesuffix(".weight"))
    return found


def targets(plan: Plan) -> dict[Scheme, list[str]]:
    """Patterns by scheme, to be read with `ignored`, which wins: `re:.*self_attn\\.o_proj$`."""
    by_leaf: dict[str, dict[Scheme, list[int]]] = {}
    for layer_idx, linears in plan.linears.items():
        for module, linear in linears.items():
            by_leaf.setdefault(module, {}).setdefault(linear.scheme, []).append(layer_idx)
    found: dict[Scheme, list[str]] = {}
    for leaf, schemes in by_leaf.items():
        for scheme, layers in schemes.items():
            where = ".*" if len(schemes) == 1 else rf".*layers\.({'|'.join(map(str, sorted(layers)))})\."
            found.setdefault(scheme, []).append(f"re:{where}{_leaf_pattern(leaf)}$")
    return found


def ignored(plan: Plan) -> list[str]:
    """Patterns for every linear module that stays as it is; modules by the names they have before engines merge any."""
    modules = linear_modules(plan)
    whole = [i for i in modules if i != OUTER and not plan.layer(i)]
    partly = [i for i in modules if i != OUTER and plan.layer(i)]
    kept: dict[str, list[int]] = {}
    for layer_idx in partly:
        for leaf in modules[layer_idx]:
            if leaf not in plan.layer(layer_idx):
                kept.setdefault(leaf, []).append(layer_idx)
    found = ["lm_head"]
    for leaf, layers in kept.items():
        everywhere = not any(leaf in plan.layer(i) for i in partly)
        where = ".*" if everywhere else rf".*layers\.({'|'.join(map(str, sorted(layers)))})\."
        found.append(f"re:{where}{_leaf_pattern(leaf)}$")
    return found + [rf"re:.*layers\.{i}\..*" for i in sorted(whole)]


def ignored_globs(plan: Plan) -> list[str]:
    """The same as globs, which have no alternatives: `*mlp.gate`."""
    modules = linear_modules(plan)
    partly = [i for i in modules if i != OUTER and plan.layer(i)]
    found = ["lm_head"]
    for leaf in dict.fromkeys(leaf for i in partly for leaf in modules[i]):
        without = [i for i in partly if leaf in modules[i] and leaf not in plan.layer(i)]
        name = leaf
        if without and not any(leaf in plan.layer(i) for i in partly):
            found.append(f"*layers.*.{name}")
        else:
            found.extend(f"*layers.{i}.{name}" for i in without)
    return found + [f"*layers.{i}.*" for i in modules if i != OUTER and not plan.layer(i)]


def matches(patterns: Iterable[str], module: str) -> bool:
    """As compressed-tensors matches names: `re:` from the start, else the whole name."""
    return any(re.match(p[3:], module) if p.startswith("re:") else p == module for p in patterns)


def _leaf_pattern(leaf: str) -> str:
    if leaf.startswith(STACK):
        return rf"mlp\.experts\.\d+\.{re.escape(leaf.removeprefix(STACK))}"
    return re.escape(leaf).replace(r"\_", "_")
