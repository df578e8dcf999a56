"""Whole runs of a small recipe with asynchronous rollouts: nothing stale is trained, nothing is trained twice."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from glm5.rl.environments.workers import RemoteEpisode
from glm5.rl.loop import run
from glm5.rl.records.store import Records, read_groups
from glm5.rl.replay import replay
from tests.support.latency import Latency, slow
from tests.support.rl_recipe import small_recipe
from tests.support.whole_runs import finish, killing_engine, run_until, steps_of

ASYNC = ("asynchronous.max_staleness=1", 'algorithm.name="dis"', "steps=5")


def check(out: Path, max_staleness: int, steps: int, push_every: int = 1, **ratios: float) -> list[int]:
    """No token of a step is older than allowed; numbers of groups, of which each was trained once."""
    numbers: list[int] = []
    for step in range(1, steps + 1):
        groups = read_groups(Records(out), step)
        numbers += [group.number for group in groups]
        version = (step - 1) // push_every
        for rollout in (one for group in groups for one in group.rollouts if one.failure != "stale"):
            assert rollout.is_withheld or 0 <= version - rollout.tree.oldest_version <= max_staleness
    assert len(set(numbers)) == len(numbers) == steps * 4
    return numbers


@pytest.mark.slow
def test_rollouts_go_on_while_the_trainer_learns(tmp_path):
    run(small_recipe(tmp_path, *ASYNC))
    check(tmp_path / "run", 1, 5)
    lines = steps_of(tmp_path / "run")
    assert max(line["staleness/max"] for line in lines) == 1
    assert all(line["group/dropped"] == 0 for line in lines)
    assert all(not one.tensors for one in replay(tmp_path / "run", 5))


@pytest.mark.slow
def test_later_turns_go_on_from_older_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(RemoteEpisode, "step", RemoteEpisode.step)  # as it is, afterwards
    slow(Latency(0, 0.05))  # or no group would be under way when weights are pushed
    kept = ("asynchronous.policy='keep-session'", "asynchronous.max_key_age=1", "asynchronous.max_staleness=2")
    run(small_recipe(tmp_path, *ASYNC, *kept, "warm_start.steps=60", "lr=1e-3", "evaluation.every=5"))
    check(tmp_path / "run", 2, 5)
    lines = steps_of(tmp_path / "run")
    assert max(line["keys/age_max"] for line in lines) == 1
    groups = [group for step in range(1, 6) for group in read_groups(Records(tmp_path / "run"), step)]
    sampled = [one for group in groups for rollout in group.rollouts for one in rollout.tree.segments if one.is_sampled]
    older = [one for one in sampled if one.key_versions]
    assert older, "no turn came after a push"
    assert any(one.context_versions and one.context_versions[0][0] < one.versions[0] for one in older)
    for one in older:
        assert all(0 <= version - oldest <= 1 for version, oldest in zip(one.versions, one.key_versions, strict=True))
    assert all(not one.tensors for one in replay(tmp_path / "run", 5)), "training depends on what the cache had"


@pytest.mark.long
def test_without_staleness_all_is_on_policy(tmp_path):
    run(small_recipe(tmp_path, *ASYNC, "asynchronous.max_staleness=0"))
    check(tmp_path / "run", 0, 5)
    for line in steps_of(tmp_path / "run"):
        assert (line["staleness/max"], line["logp/abs_diff_max"]) == (0, 0)


@pytest.mark.long
def test_several_steps_between_pushes(tmp_path):
    run(small_recipe(tmp_path, *ASYNC, "asynchronous.push_every=2", "asynchronous.max_staleness=0"))
    check(tmp_path / "run", 0, 5, push_every=2)


@pytest.mark.long
@pytest.mark.parametrize("said", ["small 0:", "small 2/5", "small 4/5"])
def test_a_killed_run_trains_every_task_once(tmp_path, said):
    code, _ = run_until(tmp_path, said, signal.SIGKILL, *ASYNC, "environment.0.tasks=1000")
    assert code == -signal.SIGKILL
    assert finish(tmp_path, *ASYNC, "environment.0.tasks=1000").returncode == 0
    check(tmp_path / "run", 1, 5)
    seeds = Counter(group.task.seed for step in range(1, 6) for group in read_groups(Records(tmp_path / "run"), step))
    assert max(seeds.values()) == 1


@pytest.mark.long
@pytest.mark.parametrize(("of", "number"), [("generate", 12), ("update_weights", 2)])
def test_an_engine_that_is_killed_loses_no_task(tmp_path, monkeypatch, caplog, of, number):
    killing_engine(monkeypatch, [number], of)
    run(small_recipe(tmp_path, *ASYNC, "environment.0.tasks=1000"))
    assert caplog.text.count("it is started again with the weights of step") == 1
    check(tmp_path / "run", 1, 5)


@pytest.mark.long
def test_an_environment_that_always_fails_ends_the_run(tmp_path):
    hostile = 'environment.0.name="tests.unit.rl.hostile_guess:NotANumber"'
    failed = finish(tmp_path, *ASYNC, hostile)
    assert failed.returncode == 1
    assert "groups in a row could not be trained; the last one: " in failed.stderr


@pytest.mark.long
def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    code, said = run_until(tmp_path, "small 1/5", signal.SIGINT, *ASYNC)
    assert code == 130
    assert "the same command goes on" in said
    assert finish(tmp_path, *ASYNC).returncode == 0
    check(tmp_path / "run", 1, 5)
