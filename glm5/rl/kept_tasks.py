"""Tasks with their pass rates on disk: a header line that says how they were measured, then a task a line (JSON)."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm5.common.atomic import atomic_write
from glm5.common.bounded import TABLES, read_bounded_text
from glm5.common.errors import ConfigError
from glm5.config.refusal import first_error, refuse
from glm5.rl.environments.protocol import Environment

HELD_OUT = 2**40
"""Seed of the first held-out task; training seeds are below it."""
_HEADER = {"format": "glm5-rl-tasks", "version": 1}


class RatedTask(BaseModel):
    """A task by its seed, with its key (`Task.key`). Pass rates: shares of replies that solve it, where measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    environment: str
    seed: Annotated[int, Field(ge=0, lt=HELD_OUT)]
    level: Annotated[int, Field(ge=0)]
    key: str
    pass_rate: float | None = None
    stronger_pass_rate: float | None = None


def write_tasks(file: Path, tasks: Iterable[RatedTask], about: Mapping[str, Any]) -> None:
    """Replace `file` atomically. `about`: how the tasks were measured."""
    with atomic_write(file) as handle:
        handle.write(json.dumps(_HEADER | dict(about)) + "\n")
        handle.writelines(task.model_dump_json() + "\n" for task in tasks)


def read_tasks(file: str | Path, *, is_journal: bool = False) -> tuple[dict[str, Any], list[RatedTask]]:
    """The header, and the tasks in order. `is_journal`: without a last line that is cut off. Raises ConfigError."""
    lines, header = list[str](), None
    try:
        text = read_bounded_text(file, TABLES, ConfigError)
        lines = text.splitlines()[: -1 if is_journal and not text.endswith("\n") else None]
        header = json.loads(lines[0]) if lines else None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except ConfigError:  # too large
        raise
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or any(header.get(key) != value for key, value in _HEADER.items()):
        raise ConfigError(f"{file}: the first line is no header; allowed: a file that glm5 rl filter wrote")
    found = list[RatedTask]()
    for number, line in enumerate(lines[1:], start=2):
        try:
            found.append(RatedTask.model_validate_json(line))
        except ValidationError as error:
            path, value, allowed = first_error(error)
            raise refuse(".".join([f"{file}: line {number}", *path]), value, allowed) from None
    return header, found


def tasks_of(file: str, name: str, environment: Environment) -> list[RatedTask]:
    """The tasks of an environment. ConfigError where there are none, or the environment makes others by now."""
    found = [task for task in read_tasks(file)[1] if task.environment == name]
    for task in found:
        if task.level >= environment.levels or environment.task(task.seed, task.level).key != task.key:
            raise ConfigError(
                f"{file}: seed {task.seed} of level {task.level} of {name} is no longer the task that was measured; "
                "run glm5 rl filter again"
            )
    if not found:
        raise ConfigError(f"{file}: has no task of {name}; allowed: a file with some, such as by wider limits")
    return found
