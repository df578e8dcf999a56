"""Checks the folders of output files before anything is computed."""

from pathlib import Path

from glm5.common.errors import UsageError


def check_parent(flag: str, path: str | None) -> None:
    """Raises UsageError if the folder of an output file does not exist."""
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise UsageError(f"{flag}: there is no folder {Path(path).parent}")
