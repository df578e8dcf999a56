"""The trainer in processes of its own: the same weights, and an end that names the rank and leaves nothing behind."""

import os
import signal
from pathlib import Path
from random import Random

import pytest
import torch

from glm5.common.errors import ProcessEnded, TrainingError
from glm5.config.rl import RLRecipe
from glm5.rl.build import PolicyBuilder
from glm5.rl.loop import Run, run
from glm5.rl.rollout import Group
from glm5.rl.state import RunState
from glm5.rl.trainer import GroupTrainer, PolicyTrainer, arithmetic
from glm5.rl.trainer_processes import TrainerProcesses
from glm5.testing.numerics import rel_rms
from tests.support.rl_recipe import small_recipe
from tests.support.rl_run import random_rollout, task_of, tokenizer
from tests.support.waiting import until
from tests.support.whole_runs import finish, run_until, steps_of, weights_of

SUMS = 1e-6  # float32, sums in another order: 1e-7 measured
STEPS = 3


def recipe_in(out: Path, *, exact: bool) -> RLRecipe:
    tokenizer().save(out / "tokens")
    config = {"hidden_size": 32, "vocab_size": 320, "intermediate_size": 32, "num_nextn_predict_layers": 1}
    model = {"preset": "nano", "tokenizer": str(out / "tokens"), "config": config}
    return RLRecipe.model_validate(
        {
            "name": "ranks",
            "out": str(out),
            "device": "cpu",
            "steps": 9,
            "lr": 1e-3,
            "threads": 1,
            "exact": exact,
            "model": model,
            "pass_tokens": 64,
            "environment": [{"name": "guess"}],
            "algorithm": {"name": "gspo", "entropy": 0.1, "steps_per_batch": 2},
            "optimizer": {"kind": "adamw", "eps": 1e-3},
            "trainer": {"timeout_s": 30},
        }
    )


def groups_of(step: int) -> list[Group]:
    random = Random(step)
    return [
        Group(number, task_of(number), [random_rollout(random, task_of(number), with_records=False) for _ in "abc"])
        for number in range(4)
    ]


def trained(trainer: GroupTrainer, out: Path, recipe: RLRecipe, steps: range) -> list[dict[str, float]]:
    """Train, save and end it; losses of each step."""
    found = [trainer.train(groups_of(step), step) for step in steps]
    trainer.save(RunState(out, recipe), steps.stop, {}, None)
    trainer.close()
    for one in found:
        current = one.scores.columns["trainer_logprobs"]
        assert (~torch.from_numpy(current).isnan()).sum() == sum(
            rollout.tree.num_sampled for group in groups_of(steps[found.index(one)]) for rollout in group.rollouts
        )
    return [one.metrics for one in found]


def alone(out: Path, recipe: RLRecipe) -> list[dict[str, float]]:
    device = torch.device("cpu")
    with arithmetic(recipe, device):
        trainer = PolicyTrainer(recipe, PolicyBuilder(recipe, out), device)
        trainer.begin()
        return trained(trainer, out, recipe, range(STEPS))


def together(out: Path, recipe: RLRecipe, num: int, steps: range) -> list[dict[str, float]]:
    trainer = TrainerProcesses(recipe, out, ["cpu"] * num)
    trainer.load_state({}) if steps.start else (trainer.warm_up(), trainer.begin())
    return trained(trainer, out, recipe, steps)


def state_of(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "state.pt", weights_only=True)["trainer"]["model"]


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path):
    """Also across a resumption by another number of ranks."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    recipe = recipe_in(tmp_path / "one", exact=False)
    want = alone(tmp_path / "one", recipe)
    other = recipe.model_copy(update={"out": str(tmp_path / "two")})
    got = together(tmp_path / "two", other, 2, range(2))
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["policy", "state.pt"]
    got += together(tmp_path / "two", other, 1, range(2, STEPS))
    for a, b in zip(want, got, strict=True):
        assert a.keys() == b.keys()
        for name in ("policy", "entropy", "ratio", "trunk norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=SUMS), name
    before = state_of(tmp_path / "one")
    for name, weight in state_of(tmp_path / "two").items():
        assert rel_rms(weight, before[name]) < SUMS, name
    control = recipe.model_copy(update={"lr": 1.01e-3})
    alone(tmp_path / "one", control)
    assert max(rel_rms(weight, before[name]) for name, weight in state_of(tmp_path / "one").items()) > 10 * SUMS


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path):
    trainer = TrainerProcesses(recipe_in(tmp_path, exact=False), tmp_path, ["cpu", "cpu"])
    trainer.warm_up()
    trainer.begin()
    os.kill(trainer._ranks[1].process.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match=r"^rank 1 of the trainer's 2 ended: its process was killed by SIGKILL"):
        trainer.train(groups_of(0), 0)
    assert trainer.has_ended
    until(lambda: all(one.process.poll() is not None for one in trainer._ranks))


@pytest.mark.long
def test_a_process_of_its_own_trains_to_the_same_bits(done, tmp_path):
    run(small_recipe(tmp_path, 'trainer.devices=["cpu"]'))
    assert weights_of(tmp_path / "run") == weights_of(done / "run")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_goes_on_after_its_trainer_has_ended(done, tmp_path, monkeypatch, caplog, number):
    """From the saved state, to the same bits as without."""
    pids = list[int]()
    train = Run._train

    def ending(self, groups):
        if self.number == 2 and not pids:
            pids.append(self.trainer._ranks[0].process.pid)
            os.kill(pids[0], number)
        return train(self, groups)

    monkeypatch.setattr(Run, "_train", ending)
    run(small_recipe(tmp_path, 'trainer.devices=["cpu"]', "trainer.timeout_s=5"))
    assert "The state of step 2 is in" in caplog.text
    assert "it goes on from there" in caplog.text
    assert weights_of(tmp_path / "run") == weights_of(done / "run")
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2, 3]
    assert not Path(f"/proc/{pids[0]}").exists()


@pytest.mark.long
def test_one_process_goes_on_with_a_run_that_two_began(tmp_path):
    """Ctrl-C ends the first part, with all of its processes."""
    settings = ("asynchronous.max_staleness=1", 'algorithm.name="dis"', "exact=false", "steps=4")
    code, said = run_until(tmp_path, "small 0:", signal.SIGINT, *settings, 'trainer.devices=["cpu", "cpu"]')
    assert code == 130
    assert "stopped after step 1; the same command goes on" in said
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1]
    assert finish(tmp_path, *settings, 'trainer.devices=["cpu"]').returncode == 0
    lines = steps_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert max(line["staleness/max"] for line in lines) <= 1


def test_the_end_of_a_process_in_a_push_names_the_saved_state(tmp_path):
    job = object.__new__(Run)
    job.out, job.number, job.saved = tmp_path, 3, 2
    with pytest.raises(TrainingError, match=r"^step 4: the trainer ended\. The state of step 2"), job._naming_state():
        raise ProcessEnded("the trainer ended")
