"""Which tasks a step asks: environments by weight, their seeds in turn, levels by a ladder."""

from collections.abc import Mapping, Sequence
from typing import Any

from glm5.config.rl import RLRecipe
from glm5.rl.environments.ladder import Ladder
from glm5.rl.environments.mixture import Mixture
from glm5.rl.environments.protocol import Environment
from glm5.rl.rollout import Group
from glm5.rl.rollouts.collect import Draw

HELD_OUT = 2**40
"""Seed of the first held-out task; training seeds are below it."""
REPLACING = 2**50
"""Number of the first group that is drawn in place of a dropped one; those of the recipe's steps are below it."""


class TaskSource:
    """Draws by the step's number. `environments`: those of the recipe, by name."""

    def __init__(self, recipe: RLRecipe, environments: Mapping[str, Environment]) -> None:
        self.recipe = recipe
        self._sections = {one.name: one for one in recipe.environment}
        self._mixture = Mixture({one.name: one.weight for one in recipe.environment})
        self._ladders = {
            one.name: Ladder(environments[one.name].levels, up=one.ladder, down=-1.0, start=one.level)
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

    def held_out(self, count: int) -> list[Draw]:
        """Held-out tasks, `count` of each environment, at its present level."""
        return [
            Draw(-1 - number, name, HELD_OUT + number, self._level(name))
            for name in self._sections
            for number in range(count)
        ]

    def observe(self, groups: Sequence[Group]) -> None:
        """Ladders climb where a level's last rollouts were rewarded enough."""
        for group in groups:
            if (ladder := self._ladders.get(group.task.environment)) is not None:
                for rollout in group.rollouts:
                    if rollout.is_valid:
                        ladder.add(group.task.level, rollout.reward)

    def state(self) -> dict[str, Any]:
        return {"had": dict(self._had), "ladders": {name: one.state_dict() for name, one in self._ladders.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._had = dict(state["had"])
        for name, ladder in self._ladders.items():
            ladder.load_state_dict(state["ladders"][name])

    def _level(self, name: str) -> int:
        return self._ladders[name].level if name in self._ladders else self._sections[name].level

    def _at(self, numbers: range) -> list[Draw]:
        for number in numbers:
            if number not in self._drawn:
                self._drawn[number] = self._next(number)
        return [self._drawn[number] for number in numbers]

    def _next(self, number: int) -> Draw:
        name = self._mixture.draw(number).environment
        section, place = self._sections[name], self._had[name]
        self._had[name] += 1
        seed = section.first_task + (place % section.tasks if section.tasks else place)
        return Draw(number, name, seed, self._level(name))
