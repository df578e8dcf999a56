"""Flags of `glm5 env make swe` and `glm5 env check`."""

from typing import Annotated

from pydantic import Field

from glm5.config.command import Command, Count, Positional


class EnvMakeConfig(Command):
    """Make tasks of software engineering from Python packages with tests, for the environment swe/FOLDER.

    The same command goes on where it was stopped. Tests need pytest and what the packages import.
    """

    source: Annotated[tuple[str, ...], Positional(), Field(min_length=1)]
    """Source distributions: .tar.gz files or unpacked folders."""
    out: str
    """Folder for the tasks, one folder for each package in it."""
    tasks: Count = 300
    """Tasks to make of each package, if it has so many."""
    workers: Annotated[int, Field(ge=1, le=64)] = 2
    """Packages at a time, each in a box."""
    unsafe_local: bool = False
    """Run the packages and their faults as this user, without a sandbox, where no sandbox can be had."""


class EnvCheckConfig(Command):
    """Check tasks of an environment: the oracle earns the most, an empty reply and an unsolved one 0, twice the same.

    Tasks that do not pass are listed beside the environment's tasks, which then leaves them out. The same command goes
    on where it was stopped.
    """

    name: Annotated[str, Positional()]
    """Environment, as recipes name it."""
    tasks: Count = 100
    """Tasks to check, of each level; fewer where it has fewer."""
    out: str | None = None
    """Folder for checked.jsonl. Default: where the tasks lie, else runs/check."""
    workers: Annotated[int, Field(ge=1, le=64)] = 2
    """Tasks at a time."""
    unsafe_local: bool = False
    """Run what replies write as this user, without a sandbox, where no sandbox can be had."""
