"""The folder with what each part found, and beside each result what it came of:

    steps.json    steps.origin.json    {"commit": ..., "version": ..., "command": [...], "served": ...}

A result that came of another command, another model or other code is none: its part is measured anew.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from glm5 import __version__
from glm5.bench.all.commands import BenchCommand, Size, read
from glm5.common.atomic import atomic_write


@dataclass(frozen=True)
class Work:
    """Results of one size and one commit. Everything here raises ConfigError for files that are damaged."""

    folder: Path
    size: Size
    commit: str | None

    def file(self, part: BenchCommand) -> Path:
        return self.folder / f"{part.name}.json"

    def found(self, part: BenchCommand) -> dict[str, Any] | None:
        """What the part left, with `partial` where it was cut short."""
        path = self.file(part)
        return read(path) if path.exists() and self._is_own(part) else None

    def is_done(self, part: BenchCommand) -> bool:
        """Whether it came to its end, and all requests of a load with it."""
        if (found := self.found(part)) is None:
            return False
        return not found.get("partial") and not any(run["failed"] for run in found.get("runs", ()))

    def begin(self, part: BenchCommand) -> None:
        """Note down what the part's result will have come of; one that came of something else goes before that."""
        if self._is_own(part):
            return
        self.file(part).unlink(missing_ok=True)
        with atomic_write(os.fspath(self._origin_file(part)), "wb") as handle:
            handle.write(msgspec.json.format(msgspec.json.encode(self._origin(part)), indent=1) + b"\n")

    def _is_own(self, part: BenchCommand) -> bool:
        path = self._origin_file(part)
        return path.exists() and read(path) == self._origin(part)

    def _origin_file(self, part: BenchCommand) -> Path:
        return self.folder / f"{part.name}.origin.json"

    def _origin(self, part: BenchCommand) -> dict[str, Any]:
        served = {"preset": self.size.preset, "layers": self.size.layers, "flags": list(part.server)}
        return {
            "commit": self.commit,
            "version": __version__,
            "command": list(part.command),
            "served": served if part.server else None,
        }
