"""Settings of `glm5 bench hybrid`."""

from typing import Annotated

from pydantic import Field

from glm5.config.command import Command, Positional


class BenchHybridConfig(Command):
    """A task with a hidden true reward under rules, a reward model that can be hacked, guards and human anchors, alone
    and together. The same command goes on with what is missing."""

    recipe: Annotated[str, Positional()] = "recipes/rl-hybrid.toml"
    """TOML file."""
    set: tuple[str, ...] = ()
    """KEY=VALUE: a value of the recipe by its path, such as steps=30."""
    seeds: Annotated[int, Field(ge=1, le=3)] = 3
    """How many of the seeds 0, 1 and 2."""
    out: str = "runs/hybrid"
    """Folder of runs.jsonl, a line a run."""
