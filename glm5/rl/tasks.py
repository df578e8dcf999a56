"""Which tasks a step asks: environments by weight, their seeds in turn, levels by a ladder."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5.common.errors import ConfigError, TrainingError
from glm5.config.rl import EnvironmentSection, RLRecipe
from glm5.rl.environments.ladder import Ladder
from glm5.rl.environments.mixture import Mixture
from glm5.rl.environments.protocol import Environment
from glm5.rl.kept_tasks import HELD_OUT, RatedTask, tasks_of
from glm5.rl.rollout import Group
from glm5.rl.rollouts.collect import Draw

REPLACING = 2**50
"""Number of the first group that is drawn in place of a dropped one; those of the recipe's steps are below it."""


class SectionTasks:
    """The tasks of one environment of a recipe, by their place: new ones, a number of them in turn, or those of a file
    in turn. ConfigError where the file cannot be used, or leaves nothing to hold out."""

    def __init__(self, section: EnvironmentSection, environment: Environment | None, held_out: int) -> None:
        self._section, self._environment = section, environment
        self._start = None if section.ladder is None else section.level
        self._kept: dict[int | None, list[RatedTask]] = {}
        if section.tasks_file is None:
            return
        assert environment is not None
        for task in tasks_of(section.tasks_file, section.name, environment):
            self._kept.setdefault(None if section.ladder is None else task.level, []).append(task)
        self._keys = {task.key for of_level in self._kept.values() for task in of_level}
        for level in self.rungs:
            if level not in self._kept:
                raise self._refused(f"has no task of level {level}, which the ladder may reach")
            if held_out:
                self.held_out(held_out, level)

    @property
    def rungs(self) -> list[int | None]:
        """The levels that a ladder may reach; None: there is no ladder."""
        if self._start is None:
            return [None]
        assert self._environment is not None
        return list(range(self._start, self._environment.levels))

    @property
    def levels(self) -> set[int]:
        """Of the first tasks."""
        kept = self._kept.get(self._start)
        return {task.level for task in kept} if kept else {self._section.level}

    @property
    def digest(self) -> str:
        """Of the file's tasks; empty without one."""
        kept = [(task.seed, task.level, task.key) for of_level in self._kept.values() for task in of_level]
        return hashlib.sha256(repr(kept).encode()).hexdigest()[:16] if kept else ""

    def at(self, place: int, level: int | None = None) -> tuple[int, int]:
        """Seed and level of a task to train on. `level`: where the ladder stands, by default at its start."""
        section = self._section
        if self._kept:
            kept = self._kept[self._start if level is None else level]
            return kept[place % len(kept)].seed, kept[place % len(kept)].level
        seed = section.first_task + (place % section.tasks if section.tasks else place)
        return seed, section.level if level is None else level

    def shown(self, place: int) -> tuple[int, int]:
        """Seed and level of a task of the warm start."""
        seed, level = self.at(place)
        if (plan := self._section.shown) is not None:
            seed = plan.first_task + (place % plan.tasks if plan.tasks else place)
            level = level if plan.level is None else plan.level
        return seed, level

    def held_out(self, count: int, level: int | None = None) -> list[tuple[int, int]]:
        """Seeds and levels of held-out tasks. With a file, none has the content of one of its tasks either."""
        if not self._kept:
            return [(HELD_OUT + number, self.at(0, level)[1]) for number in range(count)]
        found, environment = list[tuple[int, int]](), self._environment
        assert environment is not None
        for seed in range(HELD_OUT, HELD_OUT + 100 * count + 10_000):
            asked = self.at(len(found), level)[1]
            if environment.task(seed, asked).key not in self._keys:
                found.append((seed, asked))
            if len(found) == count:
                return found
        raise self._refused("has every task of a level, so that none is left to hold out")

    def _refused(self, why: str) -> ConfigError:
        section = self._section
        return ConfigError(f"environment {section.name}: tasks_file {section.tasks_file}: {why}")


class TaskSource:
    """Draws by the step's number. `environments`: those of the recipe, by name. Raises ConfigError."""

    def __init__(self, recipe: RLRecipe, environments: Mapping[str, Environment]) -> None:
        self.recipe, cfg = recipe, recipe.evaluation
        self.sections = {
            one.name: SectionTasks(one, environments.get(one.name), 0 if cfg.files else cfg.tasks)
            for one in recipe.environment
        }
        self._evaluated = {
            name: {one.name: tasks_of(file, one.name, environments[one.name]) for one in recipe.environment}
            for name, file in cfg.files.items()
        }
        self.mixture = Mixture({one.name: one.weight for one in recipe.environment})
        self._ladders = {
            one.name: Ladder(environments[one.name].levels, up=one.ladder, start=one.level)
            for one in recipe.environment
            if one.ladder is not None
        }
        self._had = {one.name: 0 for one in recipe.environment}
        self._step, self._drawn = -1, dict[int, Draw]()

    def draws(self, step: int) -> list[Draw]:
        """The groups of a step, which are the same when they are asked for again; steps come in order."""
        if step != self._step:
            self._step, self._drawn = step, {}
        count = self.recipe.rollouts.groups
        return self._at(range(step * count, (step + 1) * count))

    def replacements(self, step: int, places: range) -> list[Draw]:
        """Groups in place of dropped ones of a step whose groups were drawn; `places`: which of at most `groups`."""
        first = REPLACING + step * self.recipe.rollouts.groups
        return self._at(range(first + places.start, first + places.stop))

    def next_of(self, name: str, number: int) -> Draw:
        """The next task of an environment, for group `number`."""
        place = self._had[name]
        self._had[name] += 1
        return Draw(number, name, *self.sections[name].at(place, self._level(name)))

    def held_out(self, count: int) -> list[Draw]:
        """The first held-out tasks, `count` of each environment, at its present level."""
        return [
            Draw(-1 - number, name, seed, level)
            for name, tasks in self.sections.items()
            for number, (seed, level) in enumerate(tasks.held_out(count, self._level(name)))
        ]

    def evaluated(self) -> dict[str, list[Draw]]:
        """What evaluations ask, by the beginning of its figures' names."""
        cfg = self.recipe.evaluation
        if not cfg.files:
            return {"eval": self.held_out(cfg.tasks)}
        return {
            f"eval/{file}": [
                Draw(-1 - number, name, task.seed, task.level)
                for name, tasks in of_file.items()
                for number, task in enumerate(tasks)
            ]
            for file, of_file in self._evaluated.items()
        }

    def observe(self, groups: Sequence[Group]) -> None:
        """Ladders climb where a level's last rollouts were rewarded enough."""
        for group in groups:
            if (ladder := self._ladders.get(group.task.environment)) is not None:
                for rollout in group.rollouts:
                    if rollout.is_valid:
                        ladder.add(group.task.level, rollout.reward)

    def state(self) -> dict[str, Any]:
        ladders = {name: one.state_dict() for name, one in self._ladders.items()}
        return {
            "had": dict(self._had),
            "ladders": ladders,
            "files": self._files(),
            "weights": self.mixture.changes,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises TrainingError where a file of tasks has changed."""
        for name, digest in self._files().items():
            if state.get("files", {}).get(name) != digest:
                raise TrainingError(
                    f"environment {name}: tasks_file has other tasks than when the run began; put the old file back, "
                    "or begin anew with --restart"
                )
        self._had = dict(state["had"])
        for first, weights in state["weights"]:
            self.mixture.change(first, weights)
        for name, ladder in self._ladders.items():
            ladder.load_state_dict(state["ladders"][name])

    def _files(self) -> dict[str, str]:
        return {name: one.digest for name, one in self.sections.items() if one.digest}

    def _level(self, name: str) -> int | None:
        return self._ladders[name].level if name in self._ladders else None

    def _at(self, numbers: range) -> list[Draw]:
        for number in numbers:
            if number not in self._drawn:
                self._drawn[number] = self.next_of(self.mixture.draw(number), number)
        return [self._drawn[number] for number in numbers]
