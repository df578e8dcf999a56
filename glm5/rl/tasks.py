"""Which tasks a step asks: environments by weight, seeds in turn, levels by a ladder."""

from collections.abc import Mapping, Sequence
from typing import Any

from glm5.config.rl import RLRecipe
from glm5.rl.environments.protocol import Environment
from glm5.rl.rollout import Group
from glm5.rl.rollouts.collect import Draw

HELD_OUT = 2**40
"""Seed of the first held-out task; training seeds are below it."""
WINDOW = 8  # groups of a level over whose mean reward a ladder decides


class TaskSource:
    """Draws by the step's number. `environments`: those of the recipe, by name."""

    def __init__(self, recipe: RLRecipe, environments: Mapping[str, Environment]) -> None:
        self.recipe, self.environments = recipe, environments
        self._levels = {one.name: one.level for one in recipe.environment}
        self._had = {one.name: 0 for one in recipe.environment}
        self._drawn: tuple[int, list[Draw]] | None = None
        self._recent: dict[str, list[float]] = {one.name: [] for one in recipe.environment}

    def draws(self, step: int) -> list[Draw]:
        """The groups of a step, which are the same when they are asked for again; steps come in order."""
        count = self.recipe.rollouts.groups
        if self._drawn is None or self._drawn[0] != step:
            self._drawn = step, [self._next(number) for number in range(step * count, (step + 1) * count)]
        return self._drawn[1]

    def held_out(self, count: int) -> list[Draw]:
        """Held-out tasks, `count` of each environment, at its present level."""
        return [
            Draw(-1 - number, one.name, HELD_OUT + number, self._levels[one.name])
            for one in self.recipe.environment
            for number in range(count)
        ]

    def observe(self, groups: Sequence[Group]) -> None:
        """Ladders climb where a level's last groups were rewarded enough."""
        for one in self.recipe.environment:
            if one.ladder is None:
                continue
            recent = self._recent[one.name]
            for group in groups:
                valid = [rollout.reward for rollout in group.rollouts if rollout.is_valid]
                if group.task.environment == one.name and group.task.level == self._levels[one.name] and valid:
                    recent.append(sum(valid) / len(valid))
            last = self.environments[one.name].levels - 1
            if len(recent) >= WINDOW and sum(recent[-WINDOW:]) / WINDOW >= one.ladder:
                self._levels[one.name] = min(last, self._levels[one.name] + 1)
                recent.clear()

    def state(self) -> dict[str, Any]:
        recent = {name: list(one) for name, one in self._recent.items()}
        return {"levels": dict(self._levels), "had": dict(self._had), "recent": recent}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._levels, self._had = dict(state["levels"]), dict(state["had"])
        self._recent = {name: list(one) for name, one in state["recent"].items()}

    def _next(self, number: int) -> Draw:
        """The environment that is furthest behind its share, and its next task."""
        sections, total = self.recipe.environment, sum(one.weight for one in self.recipe.environment)
        section = max(sections, key=lambda one: one.weight / total * (number + 1) - self._had[one.name])
        place = self._had[section.name]
        self._had[section.name] += 1
        seed = section.first_task + (place % section.tasks if section.tasks else place)
        return Draw(number, section.name, seed, self._levels[section.name])
