"""Recipes: those of the package, msModelSlim's file, and what is refused by name."""

from pathlib import Path

import pytest

from glm5.common.errors import ConfigError
from glm5.config.quantize import QuantConfig, QuantizeConfig
from glm5.config.recipe_file import parse_recipe
from glm5.quantize.recipe import built_in, read_recipe, resolve

UPSTREAM = Path(__file__).parent / "upstream.yaml"
NAMES = ("w8a8", "w4a8-channel", "w4a8-group", "w4a8-sglang", "w4a16", "fp8", "nvfp4", "nvfp4-fp8")
EIGHT = {"scope": "per_channel", "dtype": "int8"}


def settings(**more: object) -> QuantizeConfig:
    return QuantizeConfig.model_validate({"model": "m", "out": "o", **more})


@pytest.mark.parametrize("name", NAMES)
def test_recipes_of_the_package_are_read(name):
    assert built_in(name).linears


def test_msmodelslims_file_runs_unchanged():
    found = resolve(settings(recipe=str(UPSTREAM)))
    assert found.target == "ascend"
    assert [step.type for step in found.recipe.process] == [
        "quarot",
        "flex_awq_ssz",
        "flex_smooth_quant",
        "linear_quant",
        "linear_quant",
        "linear_quant",
    ]
    experts = found.recipe.linears[-1]
    assert experts.takes("model.layers.3.mlp.experts.7.up_proj")
    assert not experts.takes("model.layers.78.mlp.experts.7.up_proj")
    assert found.recipe.smoothing[0].qconfig.weight.ext.step == 10
    assert found.recipe.rotation.seed == 0
    assert found.recipe.max_shard_gb == pytest.approx(4 * 1.073741824)  # part_file_size is in GiB
    assert found.notes[0].startswith('msModelSlim\'s labels of the recipe: {"config_id": "glm_5_w4a8", "score": 90')
    assert (
        resolve(settings(recipe=str(UPSTREAM), target="glm5")).notes[1]
        == "--target glm5 in place of the recipe's ascend"
    )


def test_the_article_command_line():
    given = {"model_path": "m", "save_path": "o", "quant_type": "w4a8", "device": "npu:0,1", "tag": ("vLLM_Ascend",)}
    run = QuantConfig.model_validate(given).settings()
    assert (run.scheme, run.target, run.device) == ("w4a8", "ascend", "auto")
    assert QuantConfig.model_validate({**given, "model_type": "GLM-5.3"}).settings() == run


def test_a_recipe_of_the_articles_command_line_decides_the_target(tmp_path):
    text = UPSTREAM.read_text().replace("ascendv1_saver", "compressed_tensors")
    (tmp_path / "r.yaml").write_text(text)
    given = {"model_path": "m", "save_path": "o", "config_path": str(tmp_path / "r.yaml")}
    assert resolve(QuantConfig.model_validate(given).settings()).target == "vllm"
    assert resolve(QuantConfig.model_validate(given | {"config_path": str(UPSTREAM)}).settings()).target == "ascend"


@pytest.mark.parametrize(
    ("given", "name", "residual"),
    [
        ({}, "w4a8-channel", True),
        ({"target": "ascend"}, "w4a8-channel", True),
        ({"target": "vllm"}, "w4a8-group", False),
        ({"target": "vllm", "mtp": "drop"}, "w4a8-group", True),
        ({"target": "sglang"}, "w4a8-sglang", False),
        ({"w4a8_weights": "group"}, "w4a8-group", True),
    ],
)
def test_the_target_decides(given, name, residual):
    found = resolve(settings(scheme="w4a8", **given))
    assert (found.name, found.recipe.rotation.residual) == (name, residual)
    assert bool(found.notes) == (not residual)


def test_a_target_without_such_kernels_is_refused():
    with pytest.raises(ConfigError, match="w4a8 for vllm has groups of 128"):
        resolve(settings(scheme="w4a8", target="vllm", w4a8_weights="channel"))


def test_minmax_alone_suits_qat():
    assert resolve(settings(scheme="w4a16", method="minmax")).recipe.is_plain
    assert not resolve(settings(scheme="w4a16")).recipe.is_plain


def changed(**linear: object) -> dict[str, object]:
    return {"process": [{"type": "linear_quant", "qconfig": {"weight": EIGHT}, **linear}]}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (changed(inculde=["*"]), "inculde: got .* no such key"),
        (changed(qconfig={"weight": {**EIGHT, "dtype": "int3"}}), "dtype: got 'int3'; allowed: 'int8'"),
        (changed(qconfig={"weight": {**EIGHT, "scope": "per_block"}}), "per_channel or per_group, got per_block"),
        ({"process": [{"type": "kv_smooth"}]}, "process.0.type: got 'kv_smooth'; allowed: quarot"),
        ({"process": [], "procces": 1}, "procces"),
        ({"process": [*changed()["process"], {"type": "quarot"}]}, "quarot comes first"),
        ({"spec": {"process": [], "saev": []}}, "spec.saev: got"),
        ({"spec": {"process": [], "save": None}}, "spec.save: got None; allowed: a list"),
        ({"spec": {"process": [], "save": [{"type": "ascendv1_saver", "part_size": 4}]}}, "save.0.part_size: got 4"),
        ({"spec": {"process": [], "save": [{"type": "ascendv1_saver"}] * 2}}, "save: got .* at most 1"),
        ({"spec": changed(), "eigth": dict(EIGHT)}, "eigth: got .* anchors of YAML to which spec refers"),
        ({"spec": changed(), "metadata": {"label": {"w_bit": 4}}}, "label.w_bit: got 4; allowed: 8, as the steps"),
        ({"process": [{"type": "quarot", "export_extra_info": False}]}, "export_extra_info: got False; allowed: True"),
        (
            changed(qconfig={"weight": {**EIGHT, "ext": {"step": 9}}}),
            "ext.step: got 9; allowed: nothing: it has no eff",
        ),
        ({"spec": {"process": [], "save": [{"type": "mindie_format_saver"}]}}, "spec.save.0.type: got 'mindie"),
    ],
)
def test_what_cannot_be_honoured_is_named(raw, words):
    with pytest.raises(ConfigError, match=words):
        parse_recipe(raw, "a file")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("r.toml", "process = ["),
        ("r.toml", "a = " + "[" * 10**5),
        ("r.toml", "a = " + "9" * 5000),
        ("r.yaml", "[" * 600),
        ("r.yaml", "a: 2020-99-99"),
        ("r.yaml", "a: !!timestamp x"),
        ("r.yaml", "a: !!bool x"),
        ("r.yaml", f"a: 1{':10' * 5000}.5"),
        ("r.yaml", "spec: 1\nspec: 2"),
        ("r.yaml", "spec: {process: [&a {type: group, configs: [*a]}]}"),
        ("r.yaml", "b0: &b0 {k: 1}\n" + "".join(f"b{i}: &b{i} {{<<: [{f'*b{i - 1},' * 9}]}}\n" for i in range(1, 30))),
        ("r.yaml", "c0: &c0 [x]\n" + "".join(f"c{i}: &c{i} [{f'*c{i - 1},' * 9}]\n" for i in range(1, 30))),
    ],
    ids=lambda text: text[:20],
)
def test_a_broken_file_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}: cannot be understood"):
        read_recipe(tmp_path / name)


def test_a_step_with_keys_of_several_types_is_refused():
    with pytest.raises(ConfigError, match=r"process\.0: got '1'; allowed: a group with the keys type and configs"):
        parse_recipe({"process": [{"type": "group", 1: 2, "a": 3, "configs": []}]}, "a file")


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "nvfp4"])
def test_a_method_needs_something_to_find(scheme):
    with pytest.raises(
        ConfigError, match=f"--method gptq says how 4-bit integer weights are found, of which {scheme} "
    ):
        resolve(settings(scheme=scheme, method="gptq", target="vllm"))
    assert resolve(settings(scheme="w4a16", method="gptq", target="vllm")).recipe.linears
