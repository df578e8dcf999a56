"""The filter keeps exactly the tasks whose pass rate is within the limits, and a run draws from these alone.

Policies are scripted: how many of 40 replies solve a task is known. Shares of a run are within 1 %.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm5.common.errors import ConfigError, EngineDead, TrainingError
from glm5.config.rl_filter import RLFilterConfig
from glm5.rl.build import environments_of
from glm5.rl.environments.protocol import Task
from glm5.rl.estimate import estimate
from glm5.rl.filter import Rates, candidates, measure
from glm5.rl.kept_tasks import HELD_OUT, read_tasks
from glm5.rl.loop import run
from glm5.rl.records.store import Records, read_groups
from glm5.rl.rollout import Group, Rollout
from glm5.rl.tasks import TaskSource
from tests.support.rl_recipe import recipe_file, small_recipe

SAMPLES, COUNT = 40, 82
MAX_ERROR = 0.01
WEIGHTS = {"reverse": 1, "sort": 2, "grid": 0.5}
THREE = 'environment=[{name="reverse",ladder=0.9},{name="sort",level=1,weight=2},{name="grid",level=2,weight=0.5}]'
FILES = (
    'environment=[{{name="reverse",ladder=0.9,tasks_file="{0}"}},{{name="sort",weight=2,tasks_file="{0}"}},'
    '{{name="grid",weight=0.5,tasks_file="{0}"}}]'
)
GUESS = 'environment=[{{name="guess",tasks_file="{0}"}}]'

Place = tuple[str, int, int]


def num_solved(task: Task) -> int:
    """Of SAMPLES replies by the scripted policy: 0 to 40, about equally often each."""
    return int(task.key, 16) % (SAMPLES + 1)


class Harness:
    """Plays by a script. `dies_at`: the engine ends at that task. `fails`: whether a task's sandbox fails half of the
    time."""

    reward = None

    def __init__(self, environments, solves=num_solved, dies_at=-1, fails=lambda _: False) -> None:
        self.environments, self.solves, self.dies_at, self.fails = environments, solves, dies_at, fails
        self.workers, self.num_played = self, 0

    async def task(self, name, seed, level):
        return self.environments[name].task(seed, level)

    async def score_group(self, _task, rewards):
        return rewards

    async def play(self, task, _seed, count, _on_episode, _late):
        if self.num_played == self.dies_at:
            raise EngineDead("killed")
        self.num_played += 1
        found = [Rollout(task, 0, rewards={"r": float(number < self.solves(task))}) for number in range(count)]
        for one in found[: count // 2] if self.fails(task) else ():
            one.failure = "sandbox"
        return [[one] for one in found]


class Case:
    """A filter of a recipe in a folder."""

    def __init__(self, folder, *settings, count=COUNT, **flags) -> None:
        self.recipe = small_recipe(folder, *settings)
        self.environments = environments_of(self.recipe)
        builder = SimpleNamespace(environments=self.environments, tasks=TaskSource(self.recipe, self.environments))
        self.tasks = candidates(builder, count)  # pyright: ignore[reportArgumentType]
        self.rates = Rates(folder, self.recipe, RLFilterConfig(recipe="x", **flags), self.tasks)

    def measure(self, column="pass_rate", **how) -> int:
        """The number of tasks that were played."""
        harness = Harness(self.environments, **how)
        asyncio.run(measure(harness, self.recipe, self.rates, column))  # pyright: ignore[reportArgumentType]
        return harness.num_played

    def kept(self) -> set[Place]:
        self.rates.write()
        lines = map(json.loads, self.rates.file.read_text().splitlines()[1:])
        return {(line["environment"], line["seed"], line["level"]) for line in lines}

    def rate(self, place: Place) -> float:
        """By the script."""
        name, seed, level = place
        return num_solved(self.environments[name].task(seed, level)) / SAMPLES

    def within(self, least: float, most: float) -> set[Place]:
        """The tasks whose scripted rate is within these limits."""
        places = {(one.environment, one.seed, one.level) for one in self.tasks}
        return {place for place in places if least <= self.rate(place) <= most}

    def with_file(self, environment: str, *settings: str):
        """A recipe that names the file of kept tasks."""
        return small_recipe(self.rates.file.parent, environment.format(self.rates.file), *settings)


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    """Four levels of an environment with a ladder, and one of each of two others; all measured."""
    case = Case(tmp_path_factory.mktemp("case"), THREE)
    assert case.measure() == len(case.tasks) == 6 * COUNT
    return case


def test_exactly_the_tasks_within_the_limits_are_kept(case):
    kept = case.kept()
    assert kept == case.within(0.2, 0.8)
    assert abs(len(kept) / len(case.tasks) - 25 / 41) < 0.05
    # Controls: limits that are one reply off.
    assert kept != case.within(0.225, 0.8)
    assert kept != case.within(0.2, 0.775)


def test_the_table_counts_by_environment_and_level(case):
    head, *rows = (re.split("  +", line.strip()) for line in case.rates.table().splitlines())
    assert [(row[0], int(row[1])) for row in rows] == [("grid", 2), *(("reverse", n) for n in range(4)), ("sort", 1)]
    for row in rows:
        of_row = {place for place in case.within(0, 1) if (place[0], str(place[2])) == (row[0], row[1])}
        assert len(of_row) == int(row[2]) == COUNT
        assert row[3] == f"{sum(map(case.rate, of_row)) / COUNT:.3f}"
        counts = dict(zip(head[4:], map(int, row[4:]), strict=True))
        assert counts["kept"] == len(of_row & case.within(0.2, 0.8))
        assert counts["too hard"] == len(of_row & case.within(0, 0.19))
        assert sum(counts.values()) == COUNT


def test_a_run_draws_kept_tasks_alone_by_its_weights_and_ladder(case):
    kept = case.kept()
    tasks = TaskSource(case.with_file(FILES, "rollouts.groups=500"), case.environments)
    for level in range(4):
        draws = [(one.environment, one.seed, one.level) for one in tasks.draws(level)]
        assert set(draws) <= kept
        for name, weight in WEIGHTS.items():
            of_name = Counter(place for place in draws if place[0] == name)
            assert abs(of_name.total() / 500 - weight / 3.5) < MAX_ERROR
            asked = {"reverse": level, "sort": 1, "grid": 2}[name]
            file = [place for place in kept if place[0] == name and place[2] == asked]
            assert of_name.keys() <= set(file)  # a ladder's level alone
            assert max(of_name.values()) - min(of_name[place] for place in file) <= 1  # equally often
        at = case.environments["reverse"].task(0, level)
        tasks.observe([Group(0, at, [Rollout(at, 0, rewards={"r": 1.0})] * 64)])
    # Control: without the file, about 16 of 41 are others.
    plain = TaskSource(small_recipe(case.rates.file.parent, THREE, "rollouts.groups=500"), case.environments).draws(0)
    assert sum((one.environment, one.seed, one.level) in kept for one in plain) / 500 < 0.75


def test_a_file_that_has_changed_is_refused(case):
    case.kept()
    tasks = TaskSource(case.with_file(FILES), case.environments)
    state = tasks.state()
    tasks.load_state(state)
    assert set(state["files"]) == set(WEIGHTS)
    with pytest.raises(TrainingError, match="reverse: tasks_file has other tasks than when the run began"):
        tasks.load_state(state | {"files": {}})


def test_no_held_out_task_has_the_content_of_a_kept_one(tmp_path):
    case = Case(tmp_path, max_pass_rate=1.0)
    assert len(case.tasks) == 15  # of 82 seeds
    case.measure(solves=lambda task: SAMPLES * (task.data["number"] < 10))
    assert len(case.kept()) == 9

    def numbers(recipe) -> set[int]:
        held_out = TaskSource(recipe, case.environments).held_out(64)
        assert len({draw.seed for draw in held_out}) == 64
        assert min(draw.seed for draw in held_out) >= HELD_OUT
        return {case.environments["guess"].task(draw.seed, draw.level).data["number"] for draw in held_out}

    assert numbers(case.with_file(GUESS)) == set(range(10, 16))
    assert numbers(small_recipe(tmp_path)) == set(range(1, 16))  # the control: seeds alone differ
    everything = Case(tmp_path, min_pass_rate=0.0, max_pass_rate=1.0)
    assert len(everything.kept()) == 15
    with pytest.raises(ConfigError, match=r"guess: tasks_file .* has every task of a level, so that none is left"):
        estimate(everything.with_file(GUESS))


def test_what_was_measured_is_not_measured_again(tmp_path, case):
    cut = Case(tmp_path, THREE)
    with pytest.raises(ExceptionGroup):
        cut.measure(dies_at=200)
    journal = tmp_path / "measured.jsonl"
    journal.write_text(journal.read_text()[:-9])  # killed while it wrote
    again = Case(tmp_path, THREE)
    assert again.measure() == 6 * COUNT - 199
    assert again.kept() == case.kept()
    more = Case(tmp_path, THREE, count=100, min_pass_rate=0.5)  # other limits need no measurement, more tasks do
    assert more.measure() == 6 * 18
    assert more.kept() == more.within(0.5, 0.8)
    with pytest.raises(
        TrainingError, match=r"other pass rates: recipe.rollouts.temperature was 1.0 and is 0.5; choose"
    ):
        Case(tmp_path, THREE, "rollouts.temperature=0.5")
    with pytest.raises(TrainingError, match=r"other pass rates: samples was 40 and is 8; choose another"):
        Case(tmp_path, THREE, samples=8)


def test_a_stronger_model_is_asked_what_the_policy_solves_within_the_limits(tmp_path, case):
    strong = Case(tmp_path, THREE, stronger="strong")
    strong.measure()
    assert strong.kept() == set()
    assert strong.measure("stronger_pass_rate", solves=lambda task: SAMPLES * (task.seed % 2)) == len(case.kept())
    assert strong.kept() == {place for place in case.kept() if place[1] % 2}
    with pytest.raises(TrainingError, match="other pass rates: stronger was 'strong' and is 'another'"):
        Case(tmp_path, THREE, stronger="another")
    assert Case(tmp_path, THREE).kept() == case.kept()


def test_a_task_whose_rollouts_mostly_failed_is_tried_again(tmp_path):
    case = Case(tmp_path)
    assert case.measure(fails=lambda task: task.data["number"] == 3, solves=lambda _: 25) == 15
    assert len(case.kept()) == 14
    assert case.measure(solves=lambda _: 25) == 1
    assert len(case.kept()) == 15


def test_self_play_has_no_solutions(tmp_path):
    with pytest.raises(ConfigError, match="environment kuhn: is self-play, in which no task is solved"):
        Case(tmp_path, 'environment=[{name="kuhn"}]')


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (None, "cannot be read: No such file"),
        ("", "the first line is no header"),
        ("[1]", "the first line is no header"),
        ('{"seed": -1}', r"line 2.seed: got -1; allowed: at least 0"),
        ('{"level": 9}', "seed 0 of level 9 of guess is no longer the task"),
        ('{"key": "x"}', "seed 0 of level 0 of guess is no longer the task that was measured"),
        ('{"environment": "sort"}', "has no task of guess"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, line, said):
    case = Case(tmp_path, max_pass_rate=1.0)
    case.measure(solves=lambda _: SAMPLES)
    case.kept()
    header, first, *_ = case.rates.file.read_text().splitlines()
    if line is None:
        case.rates.file.unlink()
    elif line.startswith("{"):
        case.rates.file.write_text("\n".join([header, json.dumps(json.loads(first) | json.loads(line))]))
    else:
        case.rates.file.write_text(line)
    with pytest.raises(ConfigError, match=rf"tasks\.jsonl: {said}"):
        estimate(case.with_file(GUESS))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (['environment=[{name="guess",tasks_file="x",tasks=3,level=1}]'], "leave out tasks and level"),
        (['environment=[{name="guess",first_task=1099511627776}]'], r"first_task: got 1099511627776; allowed: below"),
    ],
)
def test_a_recipe_has_one_source_of_tasks(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        small_recipe(tmp_path, *settings)


def test_no_more_is_measured_than_is_to_be_kept(tmp_path, case):
    few = Case(tmp_path, THREE, keep=5)
    assert few.measure() < len(few.tasks) / 2
    assert Counter(name for name, *_ in few.kept()) == dict.fromkeys(WEIGHTS, 5)
    assert few.kept() < case.kept()
    for line in few.rates.table().splitlines()[1:]:
        _, _, count, _, *verdicts = line.split()
        assert int(count) == sum(map(int, verdicts))
    assert few.measure() == 0  # by the same command
    assert Case(tmp_path, THREE, keep=6).rates.missing("pass_rate")


def test_the_tasks_of_files_are_evaluated(case):
    case.kept()
    recipe = case.with_file(FILES, f'evaluation.files={{trained="{case.rates.file}",others="{case.rates.file}"}}')
    evaluated = TaskSource(recipe, case.environments).evaluated()
    assert list(evaluated) == ["eval/trained", "eval/others"]
    for draws in evaluated.values():
        assert {(draw.environment, draw.seed, draw.level) for draw in draws} == case.kept()
        assert max(draw.number for draw in draws) < 0  # no seed of a training step
    assert list(TaskSource(case.with_file(FILES), case.environments).evaluated()) == ["eval"]


SORT = ('environment=[{name="sort"}]', "rollouts.max_tokens=8")


def command(folder: Path, *flags: str) -> list[str]:
    line = [sys.executable, "-m", "glm5", "rl", "filter", str(recipe_file(folder)), "--set", f"out={folder / 'run'}"]
    return [*line, *SORT, "--samples", "4", "--tasks", "30", "--min-pass-rate", "0", "--max-pass-rate", "1", *flags]


@pytest.mark.long
def test_the_commands_of_the_guide(tmp_path):
    """Ctrl-C once the engine is there, the rest by the same command with a stronger model, a run on what was kept."""
    with subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = list[str]()
        for line in process.stderr:
            said.append(line)
            if "preparing layers and cache took" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert "Traceback" not in "".join(said)
    stronger = ["--stronger", str(tmp_path / "run-filter/policy"), "--stronger-min-pass-rate", "0"]
    done = subprocess.run(command(tmp_path, *stronger), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"sort +0 +30 +\d\.\d+ +0 +0 +0 +0 +0 +30$", done.stdout, flags=re.MULTILINE), done.stdout
    assert done.stderr.count("rate: 30/30 task") >= 1, done.stderr
    line = 'environment=[{{name="sort",tasks_file="{}"}}]'.format(tmp_path / "run-filter/tasks.jsonl")
    run(small_recipe(tmp_path, line, SORT[1], "steps=1"))
    _, kept = read_tasks(tmp_path / "run-filter/tasks.jsonl")
    groups = read_groups(Records(tmp_path / "run"), 1)
    assert [one.task.key for one in groups] == [one.key for one in kept[: len(groups)]]
