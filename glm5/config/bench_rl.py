"""Settings of `glm5 bench rl`."""

from typing import Annotated, Literal

from pydantic import Field

from glm5.config.command import Command, Positional


class BenchRLConfig(Command):
    """Reinforcement learning of a recipe whose environment asks once: tokens per second of rollouts and of training,
    and the time to a mean reward, over several seeds; beside another library from the same checkpoint, in turn."""

    recipe: Annotated[str, Positional()] = "recipes/rl-sort.toml"
    """TOML file."""
    set: tuple[str, ...] = ()
    """KEY=VALUE: a value of the recipe by its path, such as rollouts.groups=8."""
    against: Literal["trl"] | None = None
    """Train in this library, too."""
    peer_python: str | None = None
    """Python interpreter of an environment with that library. Default: this one."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1, max_length=100)] = (0, 1, 2)
    """Seeds, one run of each side each."""
    reward: Annotated[float, Field(gt=0, lt=1e6)] = 0.8
    """Mean reward over the last five steps, to which the time is measured."""
    out: str = "runs/bench-rl"
    """Folder for checkpoint, runs and logs."""
    json_: Annotated[str | None, Field(alias="json")] = None
    """File for the results."""
