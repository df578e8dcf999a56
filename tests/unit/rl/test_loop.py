"""Whole runs of a small recipe: what they leave, and how they go on after whatever ends them."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm5 import LLM, SamplingParams, load
from glm5.chat import Tokenizer
from glm5.common.errors import EngineDead, TrainingError
from glm5.rl import loop, trainer
from glm5.rl.loop import run
from glm5.rl.records.digest import digests
from glm5.rl.records.store import Records, read_groups
from glm5.rl.state import RunState
from glm5.rl.watch import LOW_ENTROPY, LOW_STEPS, Watch, read_lines
from tests.support.rl_recipe import small_recipe
from tests.support.whole_runs import REPO, SECONDS, finish, killing_engine, run_until, steps_of, weights_of

MISMATCH = 1e-3  # k3: e4m3 rounds by up to 1/16, so logits near 1 differ by a few hundredths, and k3 is half the square


def test_conversations_begin_with_the_system_message(done):
    (rollout, *_) = read_groups(Records(done / "run"), 3)[0].rollouts
    assert rollout.messages[:2] == [{"role": "system", "content": "A game"}, *rollout.task.messages]
    tokenizer = Tokenizer.from_dir(done / "run" / "policy")
    assert "<|system|>A game<|user|>Guess 1 to 15" in tokenizer.decode(rollout.tree.segments[0].token_ids)


def test_trainer_and_engine_agree_to_the_bit(done):
    lines = steps_of(done / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["kl/mismatch"] == 0.0
        assert line["is/ratio_mean"] == 1.0
        assert line["logp/abs_diff_max"] == 0.0
        assert line["is/mask_frac"] == 0.0
        assert line["group/dropped"] == line["group/refilled"] == 0.0
        assert 0 < line["push/stopped_s"] <= line["time/push"]
        assert line["push/gb_s"] > 0
    evaluated = [line["step"] for line in read_lines(done / "run/metrics.jsonl") if "eval/mean" in line]
    assert evaluated == [0, 2, 3]


def test_the_policy_is_a_checkpoint(done):
    saved = torch.load(done / "run/state.pt", weights_only=True)["trainer"]["model"]
    assert digests(load(done / "run/policy").state_dict()) == digests(saved)


@pytest.mark.slow
@pytest.mark.parametrize("arrives", [True, pytest.param(False, marks=pytest.mark.long)])
def test_rollouts_with_quantized_weights(tmp_path, monkeypatch, arrives):
    """Every push is quantized: the engine's probabilities stay near the trainer's, and are not the same."""
    if not arrives:  # the control: all but one tensor keep their first values
        of_norm = "model.norm.weight"
        weights = trainer.PolicyTrainer.weights
        monkeypatch.setattr(trainer.PolicyTrainer, "weights", lambda self: {of_norm: weights(self)[of_norm]})
    run(small_recipe(tmp_path, "exact=false", "rollouts.quantization=fp8"))
    found = [line["kl/mismatch"] for line in steps_of(tmp_path / "run")]
    assert 0 < found[0] < MISMATCH
    assert all((one < MISMATCH) == arrives and one for one in found[1:])


def test_a_finished_run_is_not_run_again(done):
    before = (done / "run/state.pt").stat().st_mtime_ns
    assert run(small_recipe(done)) == done / "run/policy"
    assert (done / "run/state.pt").stat().st_mtime_ns == before


def test_another_recipe_is_refused(done):
    with pytest.raises(TrainingError, match=r"run of another recipe: lr was 0\.01 and is 0\.02; .*--restart"):
        run(small_recipe(done, "lr=0.02"))


def test_a_full_disk_leaves_the_state_before(done, tmp_path, monkeypatch):
    recipe = small_recipe(tmp_path)
    state = RunState(tmp_path, recipe)
    state.write(1, {}, {})

    def full(_number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match=r"state\.pt: writing failed: No space left .* make room"):
        state.write(2, {}, {})
    found = state.read()
    assert found is not None
    assert found["step"] == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_low_entropy_is_told_once(tmp_path, caplog):
    with Watch(tmp_path, small_recipe(tmp_path), 0) as watch:
        low = {"entropy": LOW_ENTROPY / 2}
        for step, metrics in enumerate([low] * (LOW_STEPS - 1) + [{"entropy": 1.0}] + [low] * 20, start=1):
            watch.step(step, metrics)
    (said,) = [one.getMessage() for one in caplog.records if "entropy" in one.getMessage()]
    assert said.startswith(f"step {2 * LOW_STEPS}: the entropy has been below 0.01 nats a token for 5 steps")


def test_lines_of_a_run_at_its_beginning_are_all_repeated(tmp_path):
    for _ in range(2):
        with Watch(tmp_path, small_recipe(tmp_path), 0) as watch:
            watch.evaluated(0, {"eval/mean": 0.5})
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 1


class Job(loop.Run):
    """A run whose engine is an object of the test."""

    def __init__(self) -> None:
        self.number, self.saved, self.has_restarted, self.out = 4, 2, False, Path("run")
        self.started = 0

    async def _start_engine(self) -> None:
        self.started += 1


def test_an_engine_that_ends_is_started_again_once(caplog):
    async def dies(times=[2]):  # noqa: B006
        if times[0]:
            times[0] -= 1
            raise ExceptionGroup("a", [ValueError("b"), ExceptionGroup("c", [EngineDead("killed by SIGKILL")])])
        return "done"

    job = Job()
    with pytest.raises(TrainingError, match=r"step 5: .*ended again: .*SIGKILL.* of step 2 is in run, and"):
        asyncio.run(job._alive(dies))
    assert job.started == 1
    assert "started again with the weights of step 4" in caplog.text
    assert asyncio.run(Job()._alive(dies)) == "done"


def test_errors_of_rollouts_are_told_as_they_are():
    async def fails():
        raise ExceptionGroup("a", [ExceptionGroup("b", [TrainingError("no task")])])

    with pytest.raises(TrainingError, match=r"^step 5: no task\. The state of step 2"):
        asyncio.run(Job()._alive(fails))


@pytest.mark.long
def test_the_policy_is_served(done):
    with LLM(str(done / "run/policy"), device="cpu") as llm:
        (answer,) = llm.generate(["Guess 1 to 15"], SamplingParams(max_tokens=2, temperature=0))
    assert answer.outputs[0].token_ids


@pytest.mark.parametrize(
    "said",
    [
        pytest.param("small 1/3", marks=pytest.mark.slow),
        *(pytest.param(said, marks=pytest.mark.long) for said in ("small 0:", "small 2/3", "small 3/3")),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(done, tmp_path, said):
    code, _ = run_until(tmp_path, said, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert finish(tmp_path).returncode == 0
    assert weights_of(tmp_path / "run") == weights_of(done / "run")
    measured = ("time/", "perf/", "push/", "wait/", "engines/", "episode/")
    timeless = [
        [{name: value for name, value in line.items() if not name.startswith(measured)} for line in lines]
        for lines in (read_lines(folder / "run/metrics.jsonl") for folder in (tmp_path, done))
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.long
def test_a_policy_of_a_later_step_than_the_state_changes_nothing(done, tmp_path):
    code, _ = run_until(tmp_path, "small 1/3", signal.SIGKILL)
    assert code == -signal.SIGKILL
    later = (done / "run/policy/model.safetensors").read_bytes()
    (tmp_path / "run/policy/model.safetensors").write_bytes(later)
    assert finish(tmp_path).returncode == 0
    assert weights_of(tmp_path / "run") == weights_of(done / "run")


@pytest.mark.long
def test_ctrl_c_finishes_the_step_and_saves(done, tmp_path):
    code, said = run_until(tmp_path, "small 0:", signal.SIGINT)
    assert code == 130
    assert "SIGINT: the step is finished and the state written first" in said
    assert "stopped after step 1; the same command goes on" in said
    assert torch.load(tmp_path / "run/state.pt", weights_only=True)["step"] == 1
    refused = finish(tmp_path, "rollouts.groups=5")
    assert refused.returncode == 1
    assert "rollouts.groups was 4 and is 5" in refused.stderr
    assert finish(tmp_path).returncode == 0
    assert weights_of(tmp_path / "run") == weights_of(done / "run")
    assert finish(tmp_path, "lr=0.02", flags=["--restart"]).returncode == 0
    assert weights_of(tmp_path / "run") != weights_of(done / "run")
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize(
    "channel", [pytest.param("folder", marks=pytest.mark.long), pytest.param("delta", marks=pytest.mark.slow)]
)
def test_weights_by_a_folder_give_the_same_run(done, tmp_path, monkeypatch, channel):
    if channel == "delta":
        killing_engine(monkeypatch, [2], "update_weights")
    run(small_recipe(tmp_path, f"rollouts.weight_channel={channel}"))
    assert weights_of(tmp_path / "run") == weights_of(done / "run")
    assert not list((tmp_path / "run" / "weights").iterdir())
    assert steps_of(tmp_path / "run")[0]["push/bytes"] > 0


@pytest.mark.parametrize(
    ("of", "number"),
    [pytest.param("generate", 8, marks=pytest.mark.slow), pytest.param("update_weights", 2, marks=pytest.mark.long)],
)
def test_a_killed_engine_is_started_again(done, tmp_path, monkeypatch, caplog, of, number):
    killing_engine(monkeypatch, [number], of)
    run(small_recipe(tmp_path))
    assert caplog.text.count("it is started again with the weights of step") == 1
    assert weights_of(tmp_path / "run") == weights_of(done / "run")


@pytest.mark.long
def test_an_engine_killed_twice_ends_the_run(tmp_path, monkeypatch):
    killing_engine(monkeypatch, [5, 9])
    with pytest.raises(TrainingError, match=r"the engine was started again in this step and ended again: .*SIGKILL"):
        run(small_recipe(tmp_path))


@pytest.mark.long
def test_a_loss_that_is_not_finite_is_named(done, tmp_path, monkeypatch):
    preset_of = trainer.preset_of

    def spoilt(name, parameters):
        return replace(preset_of(name, parameters), advantages=lambda rewards, groups: rewards * float("nan"))

    monkeypatch.setattr(trainer, "preset_of", spoilt)
    with pytest.raises(TrainingError, match=r"step 1: policy is nan.*The state of step 0 is in .*run"):
        run(small_recipe(tmp_path))


HOSTILE = 'environment.0.name="tests.unit.rl.hostile_guess:{}"'


@pytest.mark.long
def test_a_worker_that_dies_costs_its_rollouts_alone(tmp_path):
    run(small_recipe(tmp_path, HOSTILE.format("Dying"), "steps=2", "rollouts.groups=8"))
    lines = steps_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert sum(line.get("env_fail/environment", 0) for line in lines) > 0
    assert all(line["group/refilled"] <= 8 for line in lines)
    assert all(line["kl/mismatch"] == 0 for line in lines)


@pytest.mark.long
def test_an_environment_that_always_fails_ends_the_run(tmp_path):
    with pytest.raises(TrainingError, match=r"step 1: none of 8 groups .* \(32 environment\).*not a finite number"):
        run(small_recipe(tmp_path, HOSTILE.format("NotANumber")))


@pytest.mark.long
def test_memory_is_below_what_was_estimated(tmp_path):
    recipe = str(REPO / "recipes/rl-guess.toml")
    command = [sys.executable, "-m", "glm5", "rl", recipe, "--set", f"out={tmp_path / 'run'}", "steps=4"]
    said = [
        subprocess.run([*command, *flags], capture_output=True, text=True, check=True, timeout=SECONDS).stdout
        for flags in (["--dry-run"], [], ["--dry-run"])
    ]
    parts = re.search("trainer: (.*)", said[0])
    assert parts is not None
    estimated = sum(float(part.rpartition(" ")[2]) for part in parts[1].split(", "))
    measured = max(line["perf/peak_gib"] for line in steps_of(tmp_path / "run"))
    print(f"estimated {estimated:.3f} GiB, measured {measured:.3f}")
    assert measured < 1.15 * estimated
    assert estimated < 1.5 * measured
    assert f"; measured {measured:.3g}" in said[2]


@pytest.mark.slow
def test_ctrl_c_in_the_last_evaluation_leaves_a_whole_run(tmp_path, monkeypatch):
    """The same command would not write the report any more."""
    evaluate = loop.evaluate

    async def interrupted(*given):
        if steps_of(tmp_path / "run"):
            signal.raise_signal(signal.SIGINT)
        return await evaluate(*given)

    recipe = small_recipe(tmp_path, "steps=1")
    monkeypatch.setattr(loop, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    assert (tmp_path / "run/report.html").exists()
    assert run(recipe) == tmp_path / "run/policy"
