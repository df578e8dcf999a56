"""The folder of results. Beside each result a second file records where it came from:

    steps.json    steps.origin.json    {"commit": ..., "version": ..., "command": [...], "served": ...}

A part is measured again if its result is of another command, model or commit.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5 import __version__
from glm5.bench.all.commands import BenchCommand, Size, read
from glm5.common.atomic import atomic_write_json


@dataclass(frozen=True)
class Work:
    """Results of one size and one commit. All methods raise ConfigError for damaged files."""

    folder: Path
    size: Size
    commit: str | None

    def file(self, part: BenchCommand) -> Path:
        return self.folder / f"{part.name}.json"

    def found(self, part: BenchCommand) -> dict[str, Any] | None:
        """The part's result, with `partial` set if it was interrupted; None without one."""
        path = self.file(part)
        return read(path) if path.exists() and self._is_own(part) else None

    def is_done(self, part: BenchCommand) -> bool:
        """Whether the part has finished, and no request of its load failed."""
        if (found := self.found(part)) is None:
            return False
        return not found.get("partial") and not any(run["failed"] for run in found.get("runs", ()))

    def begin(self, part: BenchCommand) -> None:
        """Record the origin of the part's coming result. A result of another origin is deleted first."""
        if self._is_own(part):
            return
        self.file(part).unlink(missing_ok=True)
        atomic_write_json(self._origin_file(part), self._origin(part))

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
