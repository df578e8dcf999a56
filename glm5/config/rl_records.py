"""Flags of the commands that read what `glm5 rl` has recorded: `glm5 rl view` and `glm5 rl replay`."""

from typing import Annotated

from pydantic import Field

from glm5.config.command import Command, Positional


class RLViewConfig(Command):
    """Show a run's curves and rollouts in a browser: groups by reward, and conversations token by token."""

    folder: Annotated[str, Positional()]
    """Folder of the run, also of one that is still going on."""
    host: str = "127.0.0.1"
    """Address to listen at. Anyone who reaches it can read the rollouts."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8010
    """0: any free one."""


class RLReplayConfig(Command):
    """Redo a training step from its record and the nearest state saved before it; compare the weights to the bit."""

    folder: Annotated[str, Positional()]
    """Folder of the run."""
    step: Annotated[int, Field(ge=1, lt=2**62), Positional()]
    """The step, from 1."""
