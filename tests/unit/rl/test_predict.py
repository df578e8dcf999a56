"""Predictions of asynchronous runs: equal to what can be computed by hand, near what the orchestrator itself does on a
counted clock; the figures of who waited, on which they rest."""

import asyncio
import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from random import Random

import pytest

from glm5.cli.main import main
from glm5.rl.build import environments_of
from glm5.rl.environments.protocol import Task
from glm5.rl.figures import _staleness
from glm5.rl.orchestrator.rollouts import AsyncRollouts
from glm5.rl.predict import CALIBRATED, Profile, bound, measured_profile, predicted
from glm5.rl.report import comparison
from glm5.rl.rollout import Rollout
from glm5.rl.segments import Segment, SegmentTree
from glm5.rl.services import ServiceSettings
from glm5.rl.tasks import TaskSource
from glm5.rl.view.timeline import MOST_STEPS, timeline
from glm5.rl.waits import FIGURES, EngineMeter, beside, episode_figures, measured, waited
from tests.support.rl_recipe import recipe_file, small_recipe
from tests.support.sleeping_rollouts import sleeping_harness
from tests.support.virtual_time import virtual_time

OWN = {"tokens": [10.0] * 4, "environment_s": [3.0] * 4, "turns": [2.0]}
EVEN = Profile(0.05, 0.01, 4.0, 1.0, 0.0, {"guess": OWN}, "made up")  # 16 episodes: 10 * (0.05 + 0.16) + 3 seconds
LOG_NORMAL = [math.exp(1.2 * z) for z in (-1.2816, 0.0, 1.2816, 1.8627)]  # the last is that of 16
BUDGET = 0.15  # of step time and drops; at most 0.06 and 0.10 with seeds 0 to 7


def recipe_of(tmp_path, *settings, staleness=0):
    return small_recipe(tmp_path, f"asynchronous.max_staleness={staleness}", *settings)


def test_taking_turns_takes_the_sum(tmp_path):
    found = predicted(recipe_of(tmp_path), EVEN)
    assert found["time/step"] == pytest.approx(5.1 + 4 + 1)
    assert found["wait/trainer"] == pytest.approx(5.1 / 10.1)
    assert found["wait/engines"] == pytest.approx(1 - 2.1 / 10.1)
    assert found["staleness/dropped_share"] == 0


def test_with_time_to_spare_the_trainer_does_not_wait(tmp_path):
    found = predicted(recipe_of(tmp_path, staleness=2), replace(EVEN, train_s=8.0))
    assert (found["time/step"], found["wait/trainer"]) == (pytest.approx(9.0), pytest.approx(0.0))
    found = predicted(recipe_of(tmp_path, "asynchronous.push_every=3", staleness=2), replace(EVEN, train_s=8.0))
    assert found["time/step"] == pytest.approx(8 + 1 / 3, rel=0.02)


def test_engines_share_their_sequences(tmp_path):
    found = predicted(recipe_of(tmp_path), EVEN, engines=4)
    assert found["time/step"] == pytest.approx(10 * (0.05 + 0.04) + 3 + 5)
    halved = predicted(recipe_of(tmp_path), EVEN, concurrency=8)  # two times 8
    assert halved["time/step"] == pytest.approx(2 * (10 * (0.05 + 0.08) + 3) + 5)


def test_a_rate_bounds_the_starts(tmp_path):
    found = predicted(recipe_of(tmp_path, "environment.0.rate=48"), EVEN)  # a group every 5 seconds
    assert found["time/step"] == pytest.approx(3 * 5 + 10 * (0.05 + 0.04) + 3 + 5)
    found = predicted(recipe_of(tmp_path, "environment.0.concurrency=8"), EVEN)  # two times 8
    assert found["time/step"] == pytest.approx(2 * (10 * (0.05 + 0.08) + 3) + 5)


def test_each_environment_has_its_own_times(tmp_path):
    recipe = recipe_of(tmp_path, 'environment=[{name="guess"},{name="sort"}]')
    times = {name: OWN | {"environment_s": [seconds] * 4} for name, seconds in (("guess", 3.0), ("sort", 7.0))}
    found = predicted(recipe, replace(EVEN, step_s=0.0, token_s=0.0, episodes=times))
    assert found["time/step"] == pytest.approx(7 + 5)
    rollouts = AsyncRollouts(recipe, TaskSource(recipe, environments_of(recipe)), 0, ServiceSettings(recipe, tmp_path))
    rollouts.dispatcher.services["sort"].in_flight = 3
    rollouts._dropped_groups["guess"] = 2
    found = rollouts.figures()
    assert (found["service/in_flight/guess"], found["service/in_flight/sort"]) == (0, 3)
    assert found["service/dropped/guess"] == 2
    rollouts._dropped_groups["guess"] += 1
    assert rollouts.figures()["service/dropped/guess"] == 1


def test_the_histogram_of_staleness():
    rollout = Rollout(Task("guess", 0, 0, (), {}), 0)
    rollout.tree.add(Segment([0] * 8, is_sampled=True, logprobs=[0.0] * 8, versions=[9, 9, 9, 9, 8, 5, 2, 0]))
    found = _staleness(9, [rollout])
    assert [found[f"staleness/share_{age}"] for age in range(5)] == [0.5, 0.125, 0, 0, 0.375]
    assert "staleness/share_0" not in _staleness(9, [replace(rollout, tree=SegmentTree())])


def on_the_orchestrator(recipe, seed: int, steps: int) -> dict[str, float]:
    """Step time and drops of AsyncRollouts itself, with environments that sleep a log-normal time."""
    random, tasks = Random(seed), TaskSource(recipe, environments_of(recipe))

    harness = sleeping_harness(lambda _: random.lognormvariate(0, 1.2))

    async def run():
        rollouts = AsyncRollouts(recipe, tasks, 0, ServiceSettings(recipe, recipe.folder))
        stale, checked, began = 0.0, 0.0, 0.0
        rollouts.play_with(harness)
        for step in range(steps):
            await rollouts.batch(step)
            await asyncio.sleep(0.2)
            harness.version = step + 1
            rollouts.pushed(step + 1)
            figures = rollouts.figures()
            if step + 1 == steps // 3:
                began = asyncio.get_running_loop().time()
            elif step >= steps // 3:
                stale, checked = stale + figures["staleness/dropped"], checked + figures["staleness/checked"]
        await rollouts.cancel()
        return {
            "time/step": (asyncio.get_running_loop().time() - began) / (steps - steps // 3),
            "staleness/dropped_share": stale / checked,
        }

    with virtual_time() as runner:
        return runner.run(run())


def test_as_the_orchestrator_itself(tmp_path, seed):
    recipe = recipe_of(tmp_path, "rollouts.groups=8", staleness=2)
    real = on_the_orchestrator(recipe, seed, 75)
    places = [*LOG_NORMAL[:3], math.exp(1.2 * 2.16)]  # of 32
    own = {"tokens": [0.0] * 4, "environment_s": places, "turns": [1.0]}
    profile = Profile(0.0, 0.0, 0.2, 0.0, 0.0, {"guess": own}, "made up")
    found = predicted(recipe, profile)
    off = {name: found[name] / value - 1 for name, value in real.items()}
    print(f"seed {seed}: {real}, predicted {found}, off by {off}")
    assert all(abs(one) < BUDGET for one in off.values())
    slow = replace(profile, episodes={"guess": own | {"environment_s": [1.5 * one for one in places]}})
    assert predicted(recipe, slow)["time/step"] > (1 + BUDGET) * real["time/step"]  # the control


def line_of(step: int, **more: float) -> dict:
    figures = {"time/step": 10.0, "wait/trainer": 0.5, "wait/engines": 0.8, "time/train": 4.0, "time/push": 1.0}
    figures |= {"engines/step_s": 0.05, "engines/token_s": 0.01, "episode/turns": 2.0, "staleness/checked": 20.0}
    figures |= {f"episode/tokens_{at}": 10.0 for at in ("p10", "p50", "p90", "max")}
    figures |= {f"episode/environment_s_{at}": 3.0 for at in ("p10", "p50", "p90", "max")}
    return {"step": step, "time/wait_for_batch": 5.0, "staleness/dropped": 4.0, **figures, **more}


def test_an_earlier_run_says_how_long_things_take(tmp_path):
    recipe = recipe_of(tmp_path)
    lines = [line_of(number, **{"time/push": 1.0 if number % 4 == 0 else 0.0}) for number in range(1, 21)]
    assert replace(measured_profile(recipe, lines), source="made up") == EVEN
    more = [one | {"perf/rollout_tok_s": 10.0, "episode/s": 7.0, "episode/tokens": 10.0} for one in lines]
    more = [one | {"episode/environment_s": 3.0} for one in more]  # 4 seconds of sampling, 4 sequences at a time
    assert measured_profile(recipe, more).other_s == pytest.approx(4 - 10 * (0.05 + 4 * 0.01))
    assert measured_profile(recipe, lines[: CALIBRATED - 1]) is None
    hostile = [
        {
            **one,
            "engines/step_s": math.nan,
            "time/train": -1.0,
            "time/push": 1.0,
            "episode/tokens": "x",
            "episode/turns": 1e300,
        }
        for one in lines
    ]
    assert predicted(recipe, measured_profile(recipe, hostile))["time/step"] > 0
    own = [one | {"episode/turns/guess": 3.0, "episode/tokens_p50/guess": 7.0} for one in lines]
    assert measured_profile(recipe, own).episodes["guess"]["tokens"] == [0.0, 7.0, 0.0, 0.0]


def test_predicted_beside_measured(tmp_path):
    lines = [line_of(number) for number in range(1, 10)]
    assert measured(lines) == pytest.approx(dict(zip(FIGURES, (10.0, 0.5, 0.8, 0.2), strict=True)))
    assert beside(lines) == {}
    assert comparison(lines) == ""
    lines.insert(4, {"step": 4, **{f"predicted/{name}": 0.25 for name in FIGURES}})
    assert beside(lines)["wait/engines"] == (0.25, pytest.approx(0.8))
    assert "<th>time/step</th><td>0.25</td><td>10</td>" in comparison(lines)


def test_a_dry_run_predicts(tmp_path, capsys):
    command = ["rl", str(recipe_file(tmp_path)), "--dry-run", "--set", f"out={tmp_path / 'run'}"]
    command += ["asynchronous.max_staleness=1"]
    (tmp_path / "run").mkdir()
    lines = [json.dumps(line_of(number)) + "\n" for number in range(1, 21)]
    (tmp_path / "run/metrics.jsonl").write_text("".join(lines))
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "0.0 % of episodes stale (the medians of 14 steps in " in said
    for part in ("  by rollouts.concurrency: 4 ", "  by engines: 1 ", "  work of a step: engines "):
        assert part in said


def test_without_an_earlier_run_the_limits_count(tmp_path):
    recipe = recipe_of(tmp_path)
    profile = bound(recipe, 0.001, 4.0)
    assert profile.source == "the recipe's limits, without latency: a run of 20 steps measures both"
    found = predicted(recipe, profile)
    assert found["time/step"] == pytest.approx(128 * 16 * 0.001 + 4)


def stats_of(busy_us: int, *moments: int, steps: int = 3, sampled: int = 30) -> dict:
    return {
        "prefill": {"busy_us": busy_us},
        "decode_moments": list(moments),
        "steps": steps,
        "sampled_tokens": sampled,
    }


def test_the_engines_speed_is_found_by_their_counters():
    meter = EngineMeter()
    loads = (2, 10)  # steps of 1000 + 50 b microseconds
    micros = [1000 + 50 * b for b in loads]
    sums = (2, sum(loads), sum(micros), 104, sum(b * us for b, us in zip(loads, micros, strict=True)), 12)
    found = meter.figures([stats_of(400, *sums)])
    assert found["engines/step_s"] == pytest.approx(1e-3)
    assert found["engines/token_s"] == pytest.approx((sum(micros) + 400 - 3000) * 1e-6 / 30)
    assert 0 <= found["wait/engines"] <= 1
    assert 0 <= meter.figures([stats_of(0, 1, 4, 900, 16, 3600, 4)])["wait/engines"] <= 1  # it was started again
    assert meter.figures([]) == {"wait/engines": 1.0}


def episode(environment: str, seconds: float, own: float) -> Rollout:
    rollout = Rollout(Task(environment, 0, 0, (), {}), 0, num_turns=2, seconds=seconds, environment_seconds=own)
    rollout.tree.add(Segment([1, 2], is_sampled=True, logprobs=[0.0, 0.0], versions=[0, 0]))
    return rollout


def test_figures_of_episodes():
    found = episode_figures([episode("a", 4.0, 1.0), episode("a", 6.0, 3.0), episode("b", 20.0, 11.0)])
    assert (found["episode/s"], found["episode/s/a"], found["episode/s/b"]) == (10.0, 5.0, 20.0)
    assert (found["episode/environment_s_p50"], found["episode/environment_s_max/a"]) == (3.0, 3.0)
    assert found["wait/environment"] == 0.5
    assert not any("/a" in name for name in episode_figures([episode("a", 4.0, 1.0)]))
    assert "wait/environment" not in episode_figures([episode("a", 4.0, 0.0)])
    assert episode_figures([]) == {}


def test_who_waited_in_words_and_as_a_picture():
    lines = [line_of(number, **{"wait/environment": 0.57}) for number in range(MOST_STEPS + 20)]
    said = "trainer waited 50 %, engines idle 80 %, environments 57 % of an episode"
    assert waited(lines) == said
    text = timeline([*lines, {"step": 9, "eval/mean": 1.0}, line_of(9, **{"time/step": math.inf})])
    page = ElementTree.fromstring(f"<page>{text}</page>")
    assert page.findtext("p") == said
    assert " style=" not in text
    bars = page.findall(".//rect")
    waiting = [one for one in bars if one.get("class") == "waiting"]
    assert len(waiting) == MOST_STEPS
    assert sum(float(one.get("width")) for one in waiting) == pytest.approx(320, abs=2)
    engines = [float(one.get("height")) for one in bars if one.get("class") == "computing"]
    assert set(engines) == {4.8}
    assert timeline([]) == timeline([{"step": 1, "time/step": 1.0}]) == ""
