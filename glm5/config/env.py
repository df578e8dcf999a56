"""Flags of `glm5 env make swe`, `glm5 env check` and `glm5 env serve`."""

from typing import Annotated

from pydantic import Field

from glm5.config.command import Command, Count, Positional, Seconds


class EnvMakeConfig(Command):
    """Make tasks of software engineering for the environment swe/FOLDER: faults that are put into Python packages with
    tests, and commits of git repositories that change program and tests.

    The same command goes on where it was stopped. Tests need pytest and what the packages import.
    """

    source: Annotated[tuple[str, ...], Positional(), Field(min_length=1)]
    """Source distributions (.tar.gz files or unpacked folders), and folders of git repositories."""
    out: str
    """Folder for the tasks, one folder for each package in it."""
    tasks: Count = 300
    """Tasks to make of each source, if it has so many."""
    workers: Annotated[int, Field(ge=1, le=64)] = 2
    """Sources at a time, each in a box."""
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


class EnvServeConfig(Command):
    """Serve an environment over OpenEnv's WebSocket, so that clients of OpenEnv train on it. Each connection is a
    session with one episode at a time.
    """

    name: Annotated[str, Positional()]
    """Environment, as recipes name it."""
    level: Annotated[int, Field(ge=0, le=1000)] = 0
    """Difficulty of tasks for which a reset does not give a level."""
    host: str = "127.0.0.1"
    """Address to listen at. Anyone who reaches it can have tasks played, and run programs in their boxes."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """0: any free one."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes of the environment."""
    max_sessions: Annotated[int, Field(ge=1, le=10**4)] = 64
    """Connections with an episode at a time."""
    session_timeout: Seconds = 600.0
    """Seconds without a message after which a connection is closed."""
    unsafe_local: bool = False
    """Run what replies write as this user, without a sandbox, where no sandbox can be had."""
