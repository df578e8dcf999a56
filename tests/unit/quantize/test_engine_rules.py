"""Every module of every scheme, with and without MTP, has the scheme that was meant, by the rules of each engine."""

import json
from typing import Any

import pytest

from glm5.checkpoint.formats import choose
from glm5.config.quantize import QuantizeConfig, Target
from glm5.config.recipe import Recipe
from glm5.quantize.plan import Plan, make_plan
from glm5.quantize.recipe import resolve
from glm5.quantize.run import quantize
from tests.support.engine_rules import Rule, Unresolved, ascend_rule, asked, rule_of, words
from tests.unit.quantize.conftest import small

SCHEMES = {
    "vllm": ("w8a8", "w4a8", "w4a16", "fp8", "nvfp4", "nvfp4-fp8"),
    "sglang": ("w4a8", "w4a16", "fp8", "nvfp4", "nvfp4-fp8"),
}
CASES = [(scheme, target, mtp) for target in SCHEMES for scheme in SCHEMES[target] for mtp in ("keep", "drop")]


def recipe_of(scheme: str, target: str, mtp: str) -> Recipe:
    given = {"model": "m", "out": "o", "scheme": scheme, "target": target, "mtp": mtp}
    return resolve(QuantizeConfig.model_validate(given)).recipe


def planned(recipe: Recipe, target: Target) -> tuple[dict[str, Any], Plan]:
    plan = make_plan(small(), recipe, target)
    config = choose(plan.target, plan.schemes).config(small(), plan.schemes)
    assert config is not None
    return config, plan


def wrong(rule: Rule, engine: str, plan: Plan, *, mtp: bool) -> list[str]:
    """Modules that the engine would not compute as planned."""
    found: list[str] = []
    for each in asked(plan.cfg, engine, mtp=mtp):
        linear = plan.layer(each.layer_idx).get(each.part)
        meant = words(None if linear is None else linear.scheme)
        try:
            got = rule(each.name)
        except Unresolved as error:
            got = str(error)
        if got != meant:
            found.append(f"{each.name}: {got!r}, meant {meant!r}")
    return found


@pytest.mark.parametrize(("scheme", "target", "mtp"), CASES)
def test_rules_resolve_every_name(scheme, target, mtp):
    config, plan = planned(recipe_of(scheme, target, mtp), target)
    assert not wrong(rule_of(target, config), target, plan, mtp=mtp == "keep")


@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("target", ["vllm", "sglang"])
@pytest.mark.parametrize("kept", ["model.layers.2.mlp.*", "*shared_experts*", "model.layers.1.mlp.experts.*"])
def test_rules_resolve_layers_that_differ(scheme, target, kept):
    recipe = recipe_of(scheme, target, "keep")
    (step,) = recipe.process
    step = step.model_copy(update={"exclude": (*step.exclude, kept)})
    config, plan = planned(recipe.model_copy(update={"process": (step,)}), target)
    assert not wrong(rule_of(target, config), target, plan, mtp=True)


@pytest.mark.parametrize(
    ("scheme", "target", "missing", "num_wrong"),
    [
        ("nvfp4", "vllm", "fused_qkv", 3),  # one a layer
        ("nvfp4", "sglang", "shared_head", 1),
        ("w4a16", "sglang", "gate_up", 2),  # of shared experts
        ("w4a16", "sglang", "decoder", 1),  # experts of the MTP layer
    ],
)
def test_rules_notice_a_list_without_the_engines_names(scheme, target, missing, num_wrong):
    config, plan = planned(recipe_of(scheme, target, "keep"), target)
    shorter = config | {"ignore": [pattern for pattern in config["ignore"] if missing not in pattern]}
    assert len(shorter["ignore"]) < len(config["ignore"])
    assert len(wrong(rule_of(target, shorter), target, plan, mtp=True)) == num_wrong


@pytest.mark.parametrize("mtp", ["keep", "drop"])
def test_ascend_describes_every_name(small_bf16, tmp_path, mtp):
    given = {"model": str(small_bf16), "out": str(tmp_path / "out"), "scheme": "w8a8", "target": "ascend", "mtp": mtp}
    run = QuantizeConfig.model_validate({**given, "device": "cpu", "held_out_tokens": 0})
    described = json.loads((quantize(run) / "quant_model_description.json").read_text())
    plan, types = (
        make_plan(small(), resolve(run).recipe, "ascend"),
        {"FLOAT": "", "W8A8_DYNAMIC": "int8 channel None int"},
    )
    assert not wrong(ascend_rule(described, types), "ascend", plan, mtp=mtp == "keep")
    head = "model.layers.3.shared_head.head.weight"
    assert (head in described) == (mtp == "keep")
    if mtp == "keep":
        without = {name: kind for name, kind in described.items() if name != head}
        assert len(wrong(ascend_rule(without, types), "ascend", plan, mtp=True)) == 1
