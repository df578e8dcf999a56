"""Which scheme other engines give each module of a checkpoint, by their own names: their rules, written anew.

    vLLM 0.33         merges q_a with kv_a as fused_qkv_a_proj, gate with up; builds a head in the MTP layer
    SGLang 0.5.23     merges the same as fused_qkv_a_proj_with_mqa; calls the MTP layer model.decoder, and its head
                      model.shared_head.head. Knows the parts of gate_up_proj for FP8 and ModelOpt, not for
                      compressed-tensors
    vllm-ascend       vLLM's names, and a description of every tensor in place of patterns

A rule answers "" (not quantized), or words for the scheme, or raises `Unresolved`, where the engine ends with an error.
"""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from glm5.checkpoint.names import STACK
from glm5.config.model import ModelConfig
from glm5.quant.record import Scheme

Rule = Callable[[str], str]
GATE_UP: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}
MERGED: dict[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": GATE_UP | {"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")},
    "sglang": {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")},
}
MERGED["ascend"] = {**MERGED["vllm"], "experts": ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj")}


class Unresolved(Exception):
    """The engine does not load the checkpoint."""


class Asked(NamedTuple):
    """A module that an engine looks up: its name there, and a module of ours by whose scheme it must go."""

    name: str
    layer_idx: int
    part: str


def asked(cfg: ModelConfig, engine: str, *, mtp: bool) -> list[Asked]:
    """Every module that is built with the checkpoint's quantization; routers and the indexer's small ones are not."""
    fused = "fused_qkv_a_proj_with_mqa" if engine == "sglang" else "fused_qkv_a_proj"
    found = [Asked("lm_head", -1, "lm_head")]
    last = cfg.num_hidden_layers
    for i in range(last + (1 if mtp else 0)):
        prefix = "model.decoder" if engine == "sglang" and i == last else f"model.layers.{i}"
        names = {f"self_attn.{fused}": "self_attn.q_a_proj"}
        names |= {f"self_attn.{name}": f"self_attn.{name}" for name in ("q_b_proj", "kv_b_proj", "o_proj")}
        if cfg.has_indexer(i):
            names["self_attn.indexer.wq_b"] = "self_attn.indexer.wq_b"
        for mlp in ("mlp.shared_experts",) if cfg.is_moe(i) else ("mlp",):
            names |= {f"{mlp}.gate_up_proj": f"{mlp}.gate_proj", f"{mlp}.down_proj": f"{mlp}.down_proj"}
        if cfg.is_moe(i):
            names["mlp.experts"] = f"{STACK}up_proj"
        found += [Asked(f"{prefix}.{name}", i, part) for name, part in names.items()]
    if mtp:
        found.append(Asked("model.shared_head.head" if engine == "sglang" else f"model.layers.{last}.head", -1, "head"))
    return found


def words(scheme: Scheme | None) -> str:
    """A scheme as rules name it."""
    if scheme is None:
        return ""
    weight, act = scheme.weight, scheme.act
    return f"{weight.kind}{weight.bits} {weight.scope} {weight.group} {act.kind if act else None}"


def rule_of(engine: str, config: Mapping[str, Any]) -> Rule:
    """An engine's rule for a `quantization_config`."""
    method = config["quant_method"]
    rules = {
        ("vllm", "modelopt"): _vllm_modelopt,
        ("sglang", "modelopt"): _sglang_modelopt,
        ("vllm", "fp8"): _fp8,
        ("sglang", "fp8"): _fp8,
        ("sglang", "w4afp8"): lambda _: lambda name: "int4 group 128 fp8" if _is_stack(name) else _linear(name),
        ("vllm", "compressed-tensors"): lambda config: _compressed("vllm", config),
        ("sglang", "compressed-tensors"): lambda config: _compressed("sglang", config),
    }
    return rules[engine, method](config)


def ascend_rule(description: Mapping[str, str], grids: Mapping[str, str]) -> Rule:
    """vllm-ascend's. `grids`: words for its types."""
    described = dict(description) | {key.replace(".shared_head.", "."): kind for key, kind in description.items()}

    def rule(name: str) -> str:
        leaf = name.rpartition(".")[2]
        parts = [name.replace(leaf, part) for part in MERGED["ascend"].get(leaf, (leaf,))]
        if missing := [part for part in parts if f"{part}.weight" not in described]:
            raise Unresolved(f"{name}: {missing[0]} is not described")
        kinds = {described[f"{part}.weight"] for part in parts}
        if len(kinds) > 1:
            raise Unresolved(f"{name}: {kinds}")
        return grids[kinds.pop()]

    return rule


def _is_stack(name: str) -> bool:
    return name.endswith(".experts")


def _is_head(name: str) -> bool:
    return name == "lm_head" or name.endswith(".head")


def _linear(name: str) -> str:
    return "" if _is_head(name) else "fp88 block 128 fp8"


def _all_or_none(name: str, skipped: list[bool]) -> bool:
    if any(skipped) and not all(skipped):
        raise Unresolved(f"{name}: some parts are quantized, some are not")
    return all(skipped)


def _shards(engine: str, name: str) -> list[str]:
    leaf = name.rpartition(".")[2]
    parts = {**GATE_UP, **MERGED[engine]}
    return [name.replace(leaf, part) for part in parts.get(leaf, (leaf,))]


def _fp8(config: Mapping[str, Any]) -> Rule:
    """Names of whole modules; both engines translate a merged name into its parts. Heads are never quantized."""
    ignored = config["modules_to_not_convert"]

    def rule(name: str) -> str:
        if _is_stack(name):
            return "" if any(name in each for each in ignored if "experts" in each) else "fp88 block 128 fp8"
        engine = "sglang" if "with_mqa" in name else "vllm"
        return "" if _all_or_none(name, [each in ignored for each in _shards(engine, name)]) else _linear(name)

    return rule


def _vllm_modelopt(config: Mapping[str, Any]) -> Rule:
    """An entry that is a part of the name, or a glob of the whole, or the exact names of all parts."""
    ignored = config["ignore"]

    def rule(name: str) -> str:
        if _is_stack(name):
            skipped = any(name in each for each in ignored if "experts" in each)
        else:
            skipped = _all_or_none(name, [each in ignored for each in _shards("vllm", name)])
        skipped |= any((each in name and each != name) or fnmatchcase(name, each) for each in ignored)
        return "" if skipped else "nvfp44 group 16 None"

    return rule


def _sglang_modelopt(config: Mapping[str, Any]) -> Rule:
    """A glob of the whole or of a part between dots; or an entry whose last part is one of MLA's and stands within the
    name's last; or the exact names of all parts. The draft model's layer is never quantized, but its head is asked."""
    ignored = config["ignore"]
    within = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}

    def fits(pattern: str, name: str) -> bool:
        glob = re.compile(pattern.replace(".", r"\.").replace("*", ".*"))
        tail = pattern.rpartition(".")[2]
        return any(glob.fullmatch(each) for each in (name, *name.split("."))) or (
            tail in within and tail in name.rpartition(".")[2]
        )

    def rule(name: str) -> str:
        if name.startswith("model.decoder."):
            return ""
        skipped = any(fits(each, name) for each in ignored)
        if not _is_stack(name):
            parts = [any(f".{each}." in f".{part}." for each in ignored) for part in _shards("sglang", name)]
            skipped |= _all_or_none(name, parts)
        return "" if skipped else "nvfp44 group 16 None"

    return rule


def _compressed(engine: str, config: Mapping[str, Any]) -> Rule:
    """Regular expressions from the start, whole names (SGLang: or their ends), and classes. vLLM asks for a merged name
    first and then for its parts; SGLang for the parts of what the model says it merges, and of nothing else."""
    ignored, groups = config["ignore"], list(config["config_groups"].values())

    def fits(pattern: str, name: str) -> bool:
        if pattern.startswith("re:"):
            return re.match(pattern[3:], name) is not None
        return pattern == name or (engine == "sglang" and name.endswith(f".{pattern}"))

    def shards(name: str) -> list[str]:
        leaf = name.rpartition(".")[2]
        return [name.replace(leaf, part) for part in MERGED[engine].get(leaf, (leaf,))]

    def is_ignored(name: str) -> bool:
        if engine == "vllm" and any(fits(each, name) for each in ignored):
            return True
        return _all_or_none(name, [any(fits(each, part) for each in ignored) for part in shards(name)])

    def scheme(name: str) -> str:
        if is_ignored(name):
            return ""
        for group in groups:
            if any(fits(each, name) for each in group["targets"] if each != "Linear"):
                return _described(group)
        for group in groups:
            if all(any(fits(each, part) for each in group["targets"] if each != "Linear") for part in shards(name)):
                return _described(group)
        for group in groups:
            if "Linear" in group["targets"] and not _is_head(name):
                return _described(group)
        if _is_head(name) or engine == "vllm":
            return ""
        raise Unresolved(f"{name}: no target fits")

    def rule(name: str) -> str:
        if not _is_stack(name):
            return scheme(name)
        each = {scheme(f"{name}.0.{leaf}_proj") for leaf in ("gate", "up", "down")}
        if len(each) > 1:
            raise Unresolved(f"{name}: {each}")
        return each.pop()

    return rule


def _described(group: Mapping[str, Any]) -> str:
    weights, acts = group["weights"], group["input_activations"]
    kind = {("int", 4): "int", ("int", 8): "int", ("float", 8): "fp8", ("float", 4): "nvfp4"}
    of = {key: kind[held["type"], held["num_bits"]] for key, held in (("w", weights), ("a", acts)) if held}
    scope = {"tensor_group": "group"}.get(weights["strategy"], weights["strategy"])
    group_size = 128 if scope == "block" else weights["group_size"]
    return f"{of['w']}{weights['num_bits']} {scope} {group_size} {of.get('a')}"
