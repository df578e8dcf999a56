"""The ladder: rungs hold what their names say, answers are judged as greedy decoding would give them, runs go on."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from glm5.checkpoint.load import load
from glm5.common.errors import ConfigError
from glm5.config.quantize import LadderConfig
from glm5.quant.qat import KEY
from glm5.quantize.ladder import Example, Texts, answered, run_ladder, rungs
from glm5.quantize.ladder_report import as_text, summary, verdicts, write_report
from glm5.quantize.outliers import inject


def test_rungs_add_one_method_each():
    steps = {rung.name: [step.type for step in rung.recipe.process] for rung in rungs(("channel",))}
    methods = {rung.name: rung.recipe.linears[-1].qconfig.weight.method for rung in rungs(("channel",))}
    assert steps["channel rtn"] == steps["channel ssz"] == ["linear_quant", "linear_quant"]
    assert (methods["channel rtn"], methods["channel ssz"], methods["channel gptq"]) == ("minmax", "ssz", "gptq")
    assert steps["channel smooth"] == ["flex_smooth_quant", "linear_quant", "linear_quant"]
    assert steps["channel quarot upstream"][0] == "quarot"
    assert "channel rtn upstream" not in steps


def test_an_answer_is_right_if_every_token_is_the_likeliest():
    example = Example((5, 3, 4, 1), (False, False, True, True))
    logp = torch.zeros(4, 8)
    logp[1, 4] = logp[2, 1] = 1
    assert answered(example, logp)
    logp[2, 6] = 2
    assert not answered(example, logp)


@pytest.fixture
def texts(rng):
    def sample(number: int) -> Example:
        ids = tuple(rng.randrange(320) for _ in range(rng.randrange(6, 20)))
        return Example(ids, tuple(i > 3 for i in range(len(ids))))

    questions = [sample(i) for i in range(12)]
    return Texts(questions, lambda seed: [[(7 * i + seed) % 320 for i in range(24)]] * 4)


def test_a_ladder_goes_on_where_it_was_cut_off(small_bf16, tmp_path, texts):
    given = {"models": (str(small_bf16),), "out": str(tmp_path), "kinds": ("channel",), "seeds": (0,), "device": "cpu"}
    given |= {"num_questions": 12, "num_tokens": 100}
    settings = LadderConfig.model_validate({**given, "rungs": ("channel rtn",)})
    first = run_ladder(settings, lambda _model: texts)
    assert [row["rung"] for row in first] == ["original", "w8a8", "channel rtn"]
    assert first[0]["kl"] == 0
    assert 0 < first[1]["kl"] < first[2]["kl"]
    assert first[2]["num_tokens"] >= 100
    more = run_ladder(
        LadderConfig.model_validate({**given, "rungs": ("channel rtn", "channel gptq")}), lambda _m: texts
    )
    assert more[:3] == first
    assert [row["rung"] for row in more[3:]] == ["channel gptq"]
    said = write_report(tmp_path, more)
    assert len(said) >= 2  # and whether GPTQ gained on so few tokens
    assert "channel gptq" in as_text(summary(more))
    assert json.loads((tmp_path / "ladder.json").read_text())["verdicts"] == said
    assert (tmp_path / "ladder.html").read_text().count("<svg") == 2


def test_a_model_trained_with_int4_in_view_is_measured_too(small_bf16, tmp_path, texts):
    marked = shutil.copytree(small_bf16, tmp_path / "marked")
    config = json.loads((marked / "config.json").read_text()) | {KEY: {"bits": 4, "group_size": 128}}
    (marked / "config.json").write_text(json.dumps(config))
    given = {"models": (str(marked),), "out": str(tmp_path / "out"), "kinds": ("channel",), "seeds": (0,)}
    given |= {"device": "cpu", "num_questions": 10, "num_tokens": 100, "rungs": ("w8a8",)}
    rows = run_ladder(LadderConfig.model_validate(given), lambda _model: texts)
    assert [row["rung"] for row in rows] == ["original", "w8a8"]
    assert json.loads((marked / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rungs": ("nosuch",)}, "--rungs: got 'nosuch'; allowed: w8a8, channel rtn, channel ssz"),
        ({"models": ("nosuch",)}, "MODELS: nosuch does not exist; give the folder of a checkpoint"),
    ],
)
def test_what_is_not_there_is_refused_at_once(small_bf16, tmp_path, texts, change, said):
    given = {"models": (str(small_bf16),), "out": str(tmp_path / "out"), "kinds": ("channel",)}
    with pytest.raises(ConfigError, match=re.escape(said)):
        run_ladder(LadderConfig.model_validate(given | change), lambda _model: texts)
    assert not (tmp_path / "out").exists()


def test_losses_and_ties_are_said():
    def row(rung: str, kl: float, lost: float = 0.0) -> dict[str, float | str]:
        same = {
            "kl_answers": kl,
            "kl_median": kl,
            "top1": 1.0,
            "perplexity": 2.0,
            "perplexity_answers": 1.0,
            "accuracy": 1.0,
        }
        return {"rung": rung, "kl": kl, "lost": lost, "lost_interval": 0.1, **same}

    rows = [row("w8a8", 0.1), row("channel rtn", 0.3), row("channel ssz", 0.31), row("channel gptq", 0.22, lost=1.5)]
    rows.append(row("channel ssz upstream", 0.31))
    said = " | ".join(verdicts(summary(rows)))
    assert "0.60 of it, NOT at most half" in said
    assert "NOT within 1" in said
    assert "channel ssz is WORSE than channel rtn" in said
    assert "channel ssz is a tie with channel ssz upstream" in said
    assert not math.isnan(summary(rows)[0]["spread"])


def test_outliers_leave_the_model_as_it_was(small_bf16, tmp_path):
    ids = torch.arange(20)
    before = load(small_bf16, dtype="float64").logits(ids)
    made = inject(small_bf16, tmp_path / "made", 30.0, seed=0)
    after = load(made, dtype="float64")
    # Weights are stored in float32.
    assert ((after.logits(ids) - before).norm() / before.norm()) < 1e-5
    norm = after.model.layers[1].input_layernorm.weight
    assert norm.abs().max() > 10 * norm.abs().median()


def test_texts_of_the_demo(tmp_path: Path):
    from glm5.demo.quality import texts_of
    from glm5.train.data.dialogues import train_tokenizer

    train_tokenizer(768).save(tmp_path)
    texts = texts_of(tmp_path, 10, 5)
    assert len(texts.questions) == 10
    assert all(any(question.labelled) for question in texts.questions)
    assert len(texts.calibration(0)) == 5
    assert texts.calibration(0) != texts.calibration(1)
