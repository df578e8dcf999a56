"""Flags of `glm5 rl filter`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from glm5.config.command import Command, Count, Positional
from glm5.config.recipe import Share
from glm5.config.refusal import Refused


class RLFilterConfig(Command):
    """Keep the tasks of a recipe that are neither too easy nor too hard for the policy that it begins with.

    The same command resumes an interrupted one, and after other limits measures only what they need.
    """

    recipe: Annotated[str, Positional()]
    """TOML file."""
    set: tuple[str, ...] = ()
    """KEY=VALUE: a value of the recipe by its path, such as rollouts.temperature=0.6."""
    out: str | None = None
    """Folder for tasks.jsonl and what was measured. Default: runs/NAME-filter."""
    tasks: Count = 256
    """Tasks to measure, of each environment and level; fewer where the recipe or the environment has fewer."""
    keep: Count | None = None
    """The most tasks to keep of each environment; once it has so many, no more of its tasks are measured."""
    samples: Annotated[int, Field(ge=1, le=10**4)] = 40
    """Replies to each task, at the temperature of the recipe's rollouts."""
    min_pass_rate: Share = 0.2
    """Least share of the replies that solve a kept task."""
    max_pass_rate: Share = 0.8
    """Largest share of the replies that solve a kept task."""
    policy: str | None = None
    """Checkpoint of the policy. Default: what the recipe begins with."""
    stronger: str | None = None
    """Checkpoint of a stronger model, which must solve a kept task."""
    stronger_min_pass_rate: Share = 0.5
    """Least share of the stronger model's replies that solve a kept task."""
    unsafe_local: bool = False
    """Run what a policy writes as this user, without a sandbox, where no sandbox can be had."""

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        if self.min_pass_rate > self.max_pass_rate:
            raise Refused("max_pass_rate", self.max_pass_rate, f"at least min_pass_rate, {self.min_pass_rate:g}")
        return self
