"""Sensitivity by part: figures, a proposal within its budget, and a recipe that runs and does what it says."""

import json
from types import SimpleNamespace

import pytest

from glm5.cli.main import main
from glm5.config.quantize import QuantizeConfig
from glm5.quant.record import W4A8, W8A8
from glm5.quantize.analyze import analyze, propose
from glm5.quantize.job import prepare

BRIEF = {"sample_len": 24, "held_out_tokens": 72, "device": "cpu"}


@pytest.fixture(scope="module")
def analysis(small_bf16, tmp_path_factory):
    out = tmp_path_factory.mktemp("analysis") / "out"
    path = analyze(QuantizeConfig.model_validate({"model": str(small_bf16), "out": str(out), "analyze": True, **BRIEF}))
    return path, json.loads((path / "analysis.json").read_text())


def test_every_part_is_measured_at_every_width(analysis):
    _, found = analysis
    measured = {(each["layer"], each["part"], each["scheme"]) for each in found["branches"]}
    assert {(0, "dense mlp", "w8a8"), (1, "experts", "w4a8"), (2, "experts", "w4a16-g128")} <= measured
    assert (2, "indexer", "w8a8") not in measured  # it shares the selection before
    assert all(each["kl"] > 0 for each in found["branches"] if each["part"] != "indexer")
    kl = {(each["layer"], each["part"], each["scheme"]): each["kl"] for each in found["branches"]}
    assert kl[1, "attention", "w8a8"] < kl[1, "attention", "w4a8"]
    errors = next(e["modules"] for e in found["branches"] if (e["layer"], e["part"]) == (0, "dense mlp"))
    assert set(errors) == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert found["bits"] <= found["budget"]


def test_an_indexer_that_selects_everything_is_left_as_it_is(small_bf16, tmp_path, caplog):
    given = {"model": str(small_bf16), "out": str(tmp_path / "out"), "analyze": True, "device": "cpu"}
    for length, is_measured in ((8, False), (60, True)):
        brief = {"sample_len": length, "held_out_tokens": length, "out": str(tmp_path / str(length))}
        path = analyze(QuantizeConfig.model_validate(given | brief))
        found = json.loads((path / "analysis.json").read_text())
        parts = {each["part"]: each["kl"] for each in found["branches"]}
        assert ("indexer" in parts) == is_measured
        assert ("the indexer selects" in caplog.text) != is_measured
        caplog.clear()
    assert parts["indexer"] > 0


def test_the_proposal_is_a_recipe_that_says_the_same(analysis, small_bf16, tmp_path):
    path, found = analysis
    given = {"model": str(small_bf16), "out": str(tmp_path / "out"), "recipe": str(path / "recipe.toml"), **BRIEF}
    plan = prepare(QuantizeConfig.model_validate(given)).run.plan
    for place, width in found["proposal"].items():
        layer_idx, part = int(place.split(".")[2].split(":")[0]), place.partition(": ")[2]
        module = {
            "attention": "self_attn.o_proj",
            "indexer": "self_attn.indexer.wq_b",
            "dense mlp": "mlp.up_proj",
            "shared expert": "mlp.shared_experts.up_proj",
            "experts": "mlp.experts.*.up_proj",
        }[part]
        linear = plan.layer(layer_idx).get(module)
        assert (linear is None) == (width == "kept"), place
        if linear is not None:
            assert f"w{linear.scheme.weight.bits}" == width[:2], place
    assert not any("kv_b_proj" in linears for linears in plan.linears.values())


def test_bits_go_where_they_save_most():
    def branch(layer_idx: int, scheme: object, kl: float) -> SimpleNamespace:
        return SimpleNamespace(layer_idx=layer_idx, part="experts", scheme=scheme, kl=kl, num_weights=100)

    some = [branch(0, W8A8, 0.1), branch(0, W4A8, 1.0), branch(1, W8A8, 0.1), branch(1, W4A8, 0.3)]
    chosen = propose(some, budget=6)  # type: ignore[arg-type]
    assert {key[0]: branch.scheme.weight.bits for key, branch in chosen.items()} == {0: 8, 1: 4}
    kept = propose(some, budget=16)  # type: ignore[arg-type]
    assert set(kept.values()) == {None}


def test_the_command_says_what_it_found(small_bf16, tmp_path, capsys):
    flags = ["--sample-len", "24", "--held-out-tokens", "24", "--device", "cpu", "--budget", "4"]
    assert main(["quantize", str(small_bf16), str(tmp_path / "out"), "--analyze", *flags]) == 0
    said = capsys.readouterr().out
    assert "within 4.00 bits a weight: 4.00 bits" in said
    assert "<svg" in (tmp_path / "out" / "analysis.html").read_text()
