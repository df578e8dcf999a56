"""Objectives on pairs and their calibration, against formulas in float64; stages of kind reward and dpo."""

import copy
import json
import math
import random

import numpy as np
import pytest
import torch

from glm5.checkpoint.save import save
from glm5.common.errors import ConfigError, DataError, TrainingError
from glm5.config.parallel import ParallelConfig
from glm5.config.presets import preset
from glm5.config.step import LossConfig, OptimizerConfig
from glm5.config.train import Recipe, read_recipe
from glm5.model.packed import PackedView
from glm5.testing.numerics import rel_rms
from glm5.train.batch import Batch
from glm5.train.build import Builder
from glm5.train.calibration import calibration_error, fitted_temperature, is_at_limit, mean_loss, probabilities
from glm5.train.estimate import memory_parts
from glm5.train.loop import train
from glm5.train.optim.build import Optimizers
from glm5.train.parallel.mesh import check_stage, mesh_of
from glm5.train.preference import (
    REFERENCE,
    BradleyTerry,
    DirectPreference,
    answer_logprobs,
    preference_loss,
    reference_loss,
)
from glm5.train.reference import Reference
from glm5.train.reward_model import RewardModel
from glm5.train.stage_trainer import StageTrainer
from glm5.train.step import Phase, Step
from tests.support.models import random_model
from tests.support.peak import peak_bytes
from tests.support.tokenizers import tiny_tokenizer
from tests.support.training import RECIPE, weights

EXACT = 1e-10  # float64, sums in another order: 1e-15 measured


@pytest.fixture(scope="module")
def model():
    return random_model(5, preset("tiny").replace(value_head=True), torch.float64).train()


def batch_of_pairs(lengths: list[int], seed: int, reference: list[float] | None = None) -> Batch:
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(3, 300, sum(lengths)))
    marks = torch.from_numpy(rng.integers(0, 2, sum(lengths))).double()
    marks[torch.tensor(lengths).cumsum(0) - 1] = 1.0
    column = torch.zeros(sum(lengths), dtype=torch.float64)
    if reference is not None:
        column[torch.tensor(lengths).cumsum(0) - 1] = torch.tensor(reference, dtype=torch.float64)
    return Batch(ids, marks, lengths, columns={REFERENCE: column})


def alone(model, batch: Batch) -> list[tuple[float, float]]:
    """(reward, log-probability of the marked tokens) of each document, token by token in passes of their own."""
    found = []
    for ids, marks in zip(batch.ids_T.split(batch.lengths), batch.weight_T.split(batch.lengths), strict=True):
        hidden = model(ids, PackedView([len(ids)], stage="dense"))
        logprobs = model.head(hidden).log_softmax(-1)
        said = sum(logprobs[t - 1, ids[t]].item() for t in range(1, len(ids)) if marks[t])
        found.append((model.value_head(hidden)[-1].item(), said))
    return found


@pytest.mark.parametrize("cut", [[4], [2, 2]])
def test_losses_are_the_formulas_however_the_step_is_cut(model, cut):
    lengths, reference, beta = [5, 7, 3, 6, 9, 4, 2, 8], [-20.0, -31.0, -5.5, -30.0, -40.0, -12.0, -8.0, -50.0], 0.3
    whole = batch_of_pairs(lengths, 1, reference)
    of_each = alone(model, whole)
    batches = []
    for start, count in zip(np.cumsum([0, *cut]) * 2, cut, strict=False):
        some = slice(int(start), int(start) + 2 * count)
        tokens = slice(sum(lengths[: some.start]), sum(lengths[: some.stop]))
        columns = {REFERENCE: whole.columns[REFERENCE][tokens]}
        batches.append(Batch(whole.ids_T[tokens], whole.weight_T[tokens], lengths[some], columns=columns))
    rewards = [reward for reward, _ in of_each]
    implicit = [beta * (said - known) for (_, said), known in zip(of_each, reference, strict=True)]
    for objective, scores in ((BradleyTerry(), rewards), (DirectPreference(beta, 3), implicit)):
        differences = [a - b for a, b in zip(scores[::2], scores[1::2], strict=True)]
        optimizers = Optimizers(dict(model.named_parameters()), model.cfg, OptimizerConfig(kind="adamw"))
        step = Step(copy.deepcopy(model), optimizers, LossConfig(balance_step=0.0), Phase("dense"), None, objective)
        found = step.run(batches, 0.0)
        assert found["loss"] == pytest.approx(reference_loss(differences) / 4, rel=EXACT)
        assert found["margin"] == pytest.approx(sum(differences) / 4, rel=EXACT)
        assert found["accuracy"] == sum(one > 0 for one in differences) / 4
        assert found["chosen"] == pytest.approx(sum(scores[::2]) / 4, rel=EXACT)
        assert found["loss"] != pytest.approx(reference_loss([-one for one in differences]) / 4, rel=1e-3)  # swapped


def test_gradients_are_those_of_the_definition(model):
    batch = batch_of_pairs([4, 6, 5, 3], 2, [-3.0, -4.0, -5.0, -6.0])
    for objective in (BradleyTerry(), DirectPreference(0.2, 2)):
        ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
        hidden = ours(batch.ids_T, PackedView(batch.lengths, stage="dense"))
        score = objective.scores(ours, hidden, batch)
        preference_loss(score[::2] - score[1::2]).backward()
        scores = []
        for i, ids in enumerate(batch.ids_T.split(batch.lengths)):
            own = theirs(ids, PackedView([len(ids)], stage="dense"))
            marks = batch.weight_T.split(batch.lengths)[i]
            said = (theirs.head(own[:-1]).log_softmax(-1).gather(1, ids[1:, None])[:, 0] * marks[1:]).sum()
            is_reward = isinstance(objective, BradleyTerry)
            scores.append(theirs.value_head(own)[-1, 0] if is_reward else 0.2 * (said + 3.0 + i))
        (-(scores[0] - scores[1]).sigmoid().log() - (scores[2] - scores[3]).sigmoid().log()).backward()
        pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
        compared = [(name, a.grad, b.grad) for (name, a), b in pairs if b.grad is not None]
        assert {name for name, _, _ in compared} >= {"model.embed_tokens.weight", "model.norm.weight"}
        for name, got, wanted in compared:
            if wanted.abs().max() > 0:
                assert rel_rms(got, wanted) < EXACT, name


def test_the_loss_holds_for_differences_of_any_size():
    differences = [-700.0, -3.0, 0.0, 1e-9, 2.0, 700.0]
    got = preference_loss(torch.tensor(differences, dtype=torch.float64)).item()
    assert got == pytest.approx(reference_loss(differences), rel=1e-12)
    assert preference_loss(torch.tensor([-1e30])).item() == pytest.approx(1e30)


def test_the_temperature_of_overconfident_rewards_is_found_and_mends_them():
    seed = 7
    rng = np.random.default_rng(seed)
    true = rng.normal(0, 2, 40_000)  # log-odds
    sign = np.where(rng.random(40_000) < probabilities(true), 1.0, -1.0)
    seen = 3.0 * true * sign  # of what was chosen, less what was rejected
    temperature = fitted_temperature(seen)
    assert temperature == pytest.approx(3.0, rel=0.05), f"{seed=}"
    assert calibration_error(seen) > 0.08
    assert calibration_error(seen, temperature) < 0.01  # 10 bins of 4,000: 0.004 by chance
    nearby = [mean_loss(seen, temperature * factor) for factor in (0.99, 1.01)]
    assert mean_loss(seen, temperature) < min(nearby)
    assert fitted_temperature(np.ones(5)) == pytest.approx(0.01)
    assert fitted_temperature(-np.ones(5)) == pytest.approx(100.0)
    assert [is_at_limit(fitted_temperature(sign * np.ones(5))) for sign in (1, -1)] == [True, True]
    assert not is_at_limit(temperature)


def test_the_calibration_error_by_hand():
    """Two pairs at 0.8, of which one is right; two at 0.6, both right; a tie."""
    odds = [math.log(4.0), -math.log(4.0), math.log(1.5), math.log(1.5), 0.0]
    assert calibration_error(np.array(odds)) == pytest.approx((2 * abs(0.8 - 0.5) + 2 * abs(0.6 - 1.0) + 0) / 5)
    extremes = np.array([1e6, -1e6])
    assert calibration_error(extremes) == pytest.approx(0.5)
    assert np.isfinite(mean_loss(extremes))


STAGE = """
[[stage]]
name = "KIND"
kind = "KIND"
steps = 3
seq_len = 64
sequences = 2
pass_sequences = 1
lr = 1e-3
data = [{kind = "files", files = ["pairs.jsonl"], held_out = 0.3}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    tiny_tokenizer().save(folder / "tokenizer")
    rng = random.Random(0)
    rows = [{"prompt": "the", "chosen": f"fine {rng.random()}", "rejected": f"in {rng.random()}"} for _ in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe(folder, out, kind, *settings):
    file = folder / f"{out}.toml"
    file.write_text(RECIPE.replace("every = 3", "every = 2") + STAGE.replace("KIND", kind))
    return read_recipe(file, [f"out={folder / out}", f"model.tokenizer={folder / 'tokenizer'}", *settings])


def stop_at(monkeypatch, number):
    """The run is killed in its step of that number."""
    plain, calls = Step.run, iter(range(10**6))

    def run(self, batches, lr):
        if next(calls) == number:
            raise MemoryError("killed")
        return plain(self, batches, lr)

    monkeypatch.setattr(Step, "run", run)


@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_a_killed_stage_goes_on_to_the_same_end(folder, kind, monkeypatch):
    whole = train(recipe(folder, f"{kind}-whole", kind), folder)
    with monkeypatch.context() as patched:
        stop_at(patched, 2)
        with pytest.raises(MemoryError):
            train(recipe(folder, f"{kind}-cut", kind), folder)
    if kind == "dpo":
        check_reference(recipe(folder, "dpo-cut", kind), folder)
    cut = train(recipe(folder, f"{kind}-cut", kind), folder)
    assert weights(whole) == weights(cut)
    lines = [json.loads(line) for line in (folder / f"{kind}-cut/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "lr" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert "held-out accuracy" in (folder / f"{kind}-cut/report.html").read_text()
    if kind == "dpo":
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # policy and reference are the same
        assert steps[1]["loss"] < math.log(2) - 1e-3
        return
    held = [line for line in lines if "held out" in line][-1]
    scored = RewardModel.load(folder / "reward-cut/reward/last")
    assert scored.calibration.temperature == pytest.approx(held["temperature"], rel=1e-4)
    assert scored.calibration.num_pairs == held["held-out pairs"]
    assert (whole / "reward.json").read_bytes() == (cut / "reward.json").read_bytes()


def check_reference(plan, folder):
    """It is that of the start and nothing else: once the model has learnt, it is not computed again."""
    file = plan.folder / "data/reference-dpo.npz"
    kept = file.read_bytes()
    file.unlink()
    with pytest.raises(TrainingError, match=r"reference-dpo\.npz has no log-probabilities of some pairs"):
        train(plan, folder)
    file.write_bytes(kept[:-40])
    with pytest.raises(TrainingError, match="is damaged"):
        Reference(file)
    file.write_bytes(kept)


def test_what_pairs_do_not_go_with_is_refused(folder):
    for settings, says in (
        (["stage.0.beta=0.2"], "beta: is for stages of kind dpo"),
        (['stage.0.data.0.packing="cut"'], "learns from pairs"),
        (['stage.0.qat="int4"'], "reward makes one that scores"),
    ):
        with pytest.raises(ConfigError, match=says):
            recipe(folder, "refused", "reward", *settings)
    plain = recipe(folder, "refused", "reward").model_dump(exclude_unset=True)
    with pytest.raises(ValueError, match="stage reward trains a value head"):
        Recipe.model_validate({**plain, "model": {"checkpoint": "x"}, "lora": {"rank": 2}})
    with pytest.raises(ConfigError, match="stage reward: reward trains in one process; leave --nproc out"):
        check_stage(mesh_of(ParallelConfig(), 2), preset("tiny"), recipe(folder, "refused", "reward").stage[0])
    with pytest.raises(DataError, match=r"pairs\.jsonl holds pairs of answers .* not sft"):
        train(recipe(folder, "sft", "reward", 'stage.0.kind="sft"'), folder)
    (folder / "talk.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    with pytest.raises(DataError, match="holds no pairs; dpo needs"):
        train(recipe(folder, "talk", "dpo", 'stage.0.data.0.files=["talk.jsonl"]'), folder)


def test_an_adapter_learns_from_pairs(folder):
    """The reference is the model below the adapter, which changes nothing at first."""
    base = save(random_model(4), folder / "base", assets=folder / "tokenizer")
    given = recipe(folder, "unused", "dpo").model_dump(mode="json", exclude_unset=True)
    given |= {"model": {"checkpoint": str(base)}, "lora": {"rank": 2}, "out": str(folder / "lora")}
    adapter = train(Recipe.model_validate({**given, "stage": [{**given["stage"][0], "lr": 0.03}]}), folder)
    assert (adapter / "adapter_model.safetensors").is_file()
    lines = [json.loads(line) for line in (folder / "lora/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[-2]["loss"] < math.log(2) - 1e-3


@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_memory_is_what_the_estimate_says(folder, kind):
    """Weights, optimizer state and the peak of a step."""
    settings = ["stage.0.seq_len=64", "stage.0.sequences=1", "losses.chunk=32"]
    plan = recipe(folder, f"memory-{kind}", kind, *settings)
    builder = Builder(plan, folder, plan.folder)
    trainer, stage = StageTrainer(plan, builder, None), plan.stage[0]
    step = trainer.begin(stage, builder.cfg, None)
    rows = [builder.rows(stage).row(0)]
    trainer.prepare(stage, rows, 1, is_start=True)
    tokens = stage.sequences * stage.seq_len
    batches = trainer.batches(stage, rows * (tokens // len(rows[0].ids)))[:1]
    with peak_bytes() as peak:
        step.run(batches, 1e-3)
    said = memory_parts(builder.cfg, plan, stage)
    held = sum(one.nbytes for one in trainer.model.parameters()) + step.optimizers.state_bytes()
    assert (held + peak.at_most) / sum(said.values()) == pytest.approx(1.0, abs=0.15)


def test_answers_are_summed_by_document(model):
    batch = batch_of_pairs([5, 7, 1, 2], 3)
    with torch.no_grad():
        hidden = model(batch.ids_T, PackedView(batch.lengths, stage="dense"))
        got = answer_logprobs(model, hidden, batch, 4)
        assert got.tolist() == pytest.approx([said for _, said in alone(model, batch)], rel=EXACT)
