"""Journals: files of JSON lines that are added as results come, so that a killed process goes on from them."""

import json
from pathlib import Path
from typing import Any

from glm5.common.bounded import TABLES, read_bounded
from glm5.common.errors import GlmError


def read_journal(file: Path, error: type[GlmError], *, mends: bool = False) -> list[Any]:
    """The lines of a journal, none where there is no file. A last line that a killed process began is left out;
    `mends`: and cut off, before others follow it."""
    if not file.exists():
        return []
    content = read_bounded(file, TABLES, error)
    whole = content[: content.rfind(b"\n") + 1]
    if mends:
        with file.open("r+b") as handle:
            handle.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]
