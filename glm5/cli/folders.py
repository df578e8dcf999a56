"""Folders of files that flags name: looked for before anything is computed."""

from pathlib import Path

from glm5.common.errors import UsageError


def check_parent(flag: str, path: str | None) -> None:
    """Raises UsageError where a file is to be written and its folder is not there."""
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise UsageError(f"{flag}: there is no folder {Path(path).parent}")
