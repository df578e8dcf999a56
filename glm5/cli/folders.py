"""Folders of files that flags name: looked for before anything is computed."""

from pathlib import Path

from glm5.common.errors import UsageError


def check_parent(flag: str, path: str) -> None:
    """Raises UsageError where the folder of the file to write is not there."""
    if not Path(path).resolve().parent.is_dir():
        raise UsageError(f"{flag}: there is no folder {Path(path).parent}")
