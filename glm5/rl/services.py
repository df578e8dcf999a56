"""Environments as services: RUN/services.toml changes their weights and bounds while the run goes on.

    [[environment]]
    name = "sort"
    weight = 2.0          # keys that differ from the recipe's
    concurrency = 64

What is in force is among the figures of each step, and the weights, with the first group that they hold for, in the
run's state. A run that goes on reads the file again.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from glm5.common.errors import ConfigError
from glm5.config.rl import EnvironmentSection, RLRecipe, ServicesFile
from glm5.config.toml import read_toml
from glm5.rl.environments.mixture import Mixture

logger = logging.getLogger(__name__)

SERVICES = "services.toml"
MAX_BYTES = 2**16
COUNTS = ("started", "ended", "cancelled", "dropped")
"""Of groups; those that ended and were dropped are both."""
_WEIGHT = "service/weight/"
_MEANS = {"tokens": "tokens", "s": "seconds", "environment_s": "environment's seconds", "failed": "failed"}


class ServiceSettings:
    """The environments of a recipe as the file in `out` changes them. A wrong file is told of once in the log, and
    changes nothing."""

    def __init__(self, recipe: RLRecipe, out: Path) -> None:
        self._recipe, self._file = recipe, out / SERVICES
        self._found: tuple[int, int] | None = None
        self._in_force = recipe.environment

    @property
    def environments(self) -> Sequence[EnvironmentSection]:
        """As they are now: the file is read where it has changed."""
        try:
            stat = self._file.stat()
            found = stat.st_mtime_ns, stat.st_size
        except FileNotFoundError:
            found = None
        except OSError:  # the file system will answer another time
            return self._in_force
        if found != self._found:
            self._found = found
            try:
                self._in_force = self._recipe.environment if found is None else self._read()
                logger.info("%s: %s", SERVICES, "; ".join(map(_said, self._in_force)))
            except ConfigError as error:
                logger.error("%s; what was in force goes on", error)
        return self._in_force

    def weigh(self, mixture: Mixture, first: int) -> None:
        """The weights hold from the group of place `first` on."""
        mixture.change(first, {one.name: one.weight for one in self.environments})

    def figures(self) -> dict[str, float]:
        """What is in force; a bound that there is not has none."""
        return {
            f"service/{key}/{one.name}": float(value)
            for one in self._in_force
            for key in ("weight", "concurrency", "rate")
            if (value := getattr(one, key)) is not None
        }

    def _read(self) -> tuple[EnvironmentSection, ...]:
        if self._found is not None and self._found[1] > MAX_BYTES:  # reading must not hold up the run
            raise ConfigError(f"{self._file}: has {self._found[1]} bytes, allowed: up to {MAX_BYTES}")
        sections = read_toml(self._file, (), ServicesFile).environment
        given = {one.name: one for one in sections}
        if len(given) < len(sections):
            raise ConfigError(f"{self._file}: environment.name: one is given twice, allowed: once")
        known = {one.name for one in self._recipe.environment}
        if unknown := sorted(given.keys() - known):
            raise ConfigError(f"{self._file}: environment.name: got {unknown[0]}, allowed: {', '.join(sorted(known))}")
        if self._recipe.asynchronous is None and any(one.concurrency or one.rate for one in given.values()):
            raise ConfigError(f"{self._file}: concurrency and rate are for [asynchronous], which the run does not have")
        changes = {name: one.model_dump(exclude_unset=True) for name, one in given.items()}
        return tuple(one.model_copy(update=changes.get(one.name)) for one in self._recipe.environment)


def _said(one: EnvironmentSection) -> str:
    return f"{one.name} weight {one.weight:g}, concurrency {one.concurrency or 'any'}, rate {one.rate or 'any'}"


def statistics(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each environment of a run's lines: its weight now, its reward in the first and the last step, means of its
    episodes, and, where the run is asynchronous, how many of its groups started and what became of them."""
    names = list(
        dict.fromkeys(name.removeprefix(_WEIGHT) for line in lines for name in line if name.startswith(_WEIGHT))
    )
    return {one: _of(lines, one, f"/{one}" if len(names) > 1 else "") for one in names}


def _of(lines: Sequence[Mapping[str, Any]], name: str, suffix: str) -> dict[str, float]:
    def column(key: str) -> list[float]:
        return [line[key] for line in lines if key in line]

    rewards = column(f"reward{suffix or '/mean'}")
    found = {"weight": column(_WEIGHT + name)[-1:], "first reward": rewards[:1], "last reward": rewards[-1:]}
    shown = {key: values[0] for key, values in found.items() if values}
    shown |= {said: fmean(values) for key, said in _MEANS.items() if (values := column(f"episode/{key}{suffix}"))}
    return shown | {key: sum(values) for key in COUNTS if (values := column(f"service/{key}/{name}"))}
