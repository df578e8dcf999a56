"""Settings of `glm5 env make terminal`."""

from typing import Annotated

from pydantic import Field

from glm5.config.command import Command


class EnvMakeTerminalConfig(Command):
    """Write terminal tasks of ten kinds, of three levels in turn, as task folders that Harbor and glm5 rl read."""

    out: str
    """New folder."""
    tasks: Annotated[int, Field(ge=1, le=10_000)] = 30
    """Number of tasks."""
