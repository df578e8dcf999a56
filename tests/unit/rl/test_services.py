"""Environments as services: weights, concurrency and rates change while a run goes on, and disturb nothing."""

import asyncio
from collections import Counter

import pytest

from glm5.common.errors import ConfigError
from glm5.rl.build import environments_of
from glm5.rl.orchestrator.rollouts import AsyncRollouts
from glm5.rl.report import services
from glm5.rl.services import SERVICES, ServiceSettings, statistics
from glm5.rl.tasks import TaskSource
from tests.support.rl_recipe import small_recipe
from tests.support.sleeping_rollouts import sleeping_harness
from tests.support.virtual_time import virtual_time

TWO = 'environment=[{name="guess"},{name="sort"}]'
GROUPS, SIZE = 4, 4


def recipe_of(tmp_path, *settings):
    return small_recipe(tmp_path, "asynchronous.max_staleness=1", TWO, *settings)


def rollouts_of(recipe, out):
    tasks = TaskSource(recipe, environments_of(recipe))
    return tasks, AsyncRollouts(recipe, tasks, 0, ServiceSettings(recipe, out))


def wrote(out, *sections):
    out.mkdir(exist_ok=True)
    (out / SERVICES).write_text("".join(f"[[environment]]\n{one}\n" for one in sections))


def test_what_the_file_says_holds_and_a_wrong_one_changes_nothing(tmp_path, caplog):
    recipe = recipe_of(tmp_path, "environment.1.concurrency=8")
    settings = ServiceSettings(recipe, tmp_path)
    assert settings.environments == recipe.environment
    wrote(tmp_path, 'name = "sort"\nweight = 3', 'name = "guess"\nrate = 60')
    guess, sort = settings.environments
    assert (guess.weight, guess.rate, sort.weight, sort.concurrency) == (1, 60, 3, 8)
    for wrong, said in (
        ('name = "sort"\nweight = 0', "weight"),
        ('name = "sort"\nconcurrency = "many"', "concurrency"),
        ('name = "sort"\nlevel = 2', "level: no such key"),
        ('name = "search"', "got search, allowed: guess, sort"),
        ("weight = ", "cannot be understood"),
        ('name = "sort"\n[[environment]]\nname = "sort"', "given twice"),
        ("#" * 2**16, "allowed: up to 65536"),
    ):
        wrote(tmp_path, wrong)
        caplog.clear()
        for _ in range(3):
            assert settings.environments == (guess, sort)
        (line,) = [one.getMessage() for one in caplog.records]
        assert said in line
        assert SERVICES in line
    (tmp_path / SERVICES).unlink()
    assert settings.environments == recipe.environment
    assert settings.figures()["service/concurrency/sort"] == 8
    assert "service/rate/sort" not in settings.figures()


def test_bounds_are_for_asynchronous_runs(tmp_path, caplog):
    with pytest.raises(ConfigError, match="concurrency and rate are for"):
        small_recipe(tmp_path, "environment.0.rate=5")
    recipe = small_recipe(tmp_path)
    wrote(tmp_path, 'name = "guess"\nrate = 5')
    assert ServiceSettings(recipe, tmp_path).environments == recipe.environment
    assert "are for [asynchronous]" in caplog.text


def test_weights_change_from_the_next_step_where_rollouts_take_turns(tmp_path):
    recipe = small_recipe(tmp_path, TWO)
    tasks, settings = TaskSource(recipe, environments_of(recipe)), ServiceSettings(recipe, tmp_path)
    before = tasks.draws(3)
    wrote(tmp_path, 'name = "sort"\nweight = 1000')
    settings.weigh(tasks.mixture, 4 * GROUPS)
    assert tasks.draws(3) == before
    assert {one.environment for one in tasks.draws(4)} == {"sort"}


def test_a_run_that_waits_for_a_rate_goes_on_once_it_is_raised(tmp_path):
    recipe = recipe_of(tmp_path, "environment.1.rate=0.001", "environment.0.concurrency=8")
    _, rollouts = rollouts_of(recipe, tmp_path)
    harness = sleeping_harness(lambda _: 1.0)
    most = Counter[str]()

    async def run():
        loop = asyncio.get_running_loop()
        rollouts.play_with(harness)
        waiting = asyncio.create_task(rollouts.batch(0))
        await asyncio.sleep(60)
        assert not waiting.done()
        assert rollouts.dispatcher.services["sort"].started == 1
        wrote(tmp_path, 'name = "sort"\nrate = 240')
        began = loop.time()
        for step in range(10):
            await (waiting if step == 0 else rollouts.batch(step))
            for name, one in rollouts.dispatcher.services.items():
                most[name] = max(most[name], one.in_flight)
            harness.version = step + 1
            rollouts.pushed(step + 1)
        started = rollouts.dispatcher.services["sort"].started * SIZE
        await rollouts.cancel()
        return started / (loop.time() - began)

    with virtual_time() as runner:
        rate = runner.run(run())
    assert 3.5 < rate < 5  # four a second, and a group at once: the trainer waits for this environment alone
    assert most["guess"] <= 8
    assert sum(one.in_flight for one in rollouts.dispatcher.services.values()) == 0


def test_places_that_were_given_out_keep_their_environment_also_in_a_run_that_goes_on(tmp_path):
    recipe = recipe_of(tmp_path)
    tasks, rollouts = rollouts_of(recipe, tmp_path)
    given = rollouts.dispatcher.first_free
    assert given == 2 * GROUPS
    before = [tasks.mixture.draw(place) for place in range(1000)]
    wrote(tmp_path, 'name = "sort"\nweight = 3')
    rollouts.adjust()
    after = [tasks.mixture.draw(place) for place in range(1000)]
    assert after[:given] == before[:given]
    assert Counter(after[given:])["sort"] / (1000 - given) == pytest.approx(0.75, abs=0.02)
    other, resumed = rollouts_of(recipe, tmp_path / "elsewhere")
    assert [other.mixture.draw(place) for place in range(1000)] == before  # the control
    other.load_state(tasks.state())
    assert [other.mixture.draw(place) for place in range(1000)] == after
    assert all(resumed.dispatcher.quota(step) == rollouts.dispatcher.quota(step) for step in range(100))


def test_each_environment_has_its_statistics(tmp_path):
    recipe = recipe_of(tmp_path)
    _, rollouts = rollouts_of(recipe, tmp_path)
    settings, lines = ServiceSettings(recipe, tmp_path), []
    harness = sleeping_harness(lambda task: 1.0 if task.environment == "guess" else 3.0)

    async def run():
        rollouts.play_with(harness)
        for step in range(6):
            await rollouts.batch(step)
            harness.version = step + 1
            rollouts.pushed(step + 1)
            of_groups = {"reward/guess": step / 10, "reward/sort": 0.5}
            lines.append({"step": step + 1} | of_groups | rollouts.figures() | settings.figures())
        await rollouts.cancel()
        lines.append({"step": 7} | rollouts.figures())

    with virtual_time() as runner:
        runner.run(run())
    found = statistics(lines)
    assert found.keys() == {"guess", "sort"}
    for one in found.values():
        assert one["weight"] == 1
        assert one["started"] == one["ended"] + one["cancelled"]
    assert found["guess"]["last reward"] == 0.5
    assert found["guess"]["seconds"] == found["sort"]["seconds"] == 0  # of the harness, which this one has not
    assert "<th>dropped</th>" in services(lines)
    assert services([{"step": 1}]) == ""
