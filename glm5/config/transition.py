"""`glm5 bench transition`: from dense attention to selected keys, beside sliding windows."""

from typing import Annotated

from pydantic import Field

from glm5.config.command import Command, Positional


class TransitionConfig(Command):
    """Train dense attention, go over to selected keys, and do with windows and with dense attention what was done with
    these: accuracy of each, over several seeds."""

    recipe: Annotated[str, Positional()] = "recipes/needle-dsa.toml"
    """TOML file with stages of dense attention, then one warmup and one sparse stage."""
    set: tuple[str, ...] = ()
    """KEY=VALUE: a value of the recipe by its path, such as stage.0.steps=10."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    """Seeds, each a run of its own."""
    window: Annotated[int, Field(ge=1, le=2**31 - 1)] = 64
    """Keys of a sliding window."""
    held_out: Annotated[int, Field(ge=1)] = 128
    """Held-out sequences that accuracy is measured on."""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Trainings at the same time. Default: one a core."""
    out: str = "runs/transition"
    """Folder for all runs, and transition.json, .html and .svg."""
