"""Settings of `glm5 bench transition`."""

from typing import Annotated

from pydantic import Field

from glm5.config.command import Command, Positional


class TransitionConfig(Command):
    """Train dense attention, then continue with selected keys, with sliding windows and with dense attention, and
    compare accuracies over several seeds."""

    recipe: Annotated[str, Positional()] = "recipes/needle-dsa.toml"
    """TOML file with stages of dense attention, then one warmup and one sparse stage."""
    set: tuple[str, ...] = ()
    """KEY=VALUE: a value of the recipe by its path, such as stage.0.steps=10."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    """Seeds, one run each."""
    window: Annotated[int, Field(ge=1, le=2**31 - 1)] = 64
    """Keys of a sliding window."""
    held_out: Annotated[int, Field(ge=1)] = 128
    """Held-out sequences for the accuracy."""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Trainings at the same time. Default: one per core."""
    out: str = "runs/transition"
    """Folder for all runs, and transition.json, .html and .svg."""
