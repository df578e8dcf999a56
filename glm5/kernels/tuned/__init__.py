"""Tuned parameters of kernels by GPU: `<GPU name>.json` in this folder.

    {op: {sizes: [{"upto": number of tokens, **parameters}, ...]}}

`glm5 bench kernels --tune` writes such a file. An entry applies up to its number of tokens, down to the
previous entry. If a file, an op, sizes or an entry are missing, the op's `tiling_for` decides.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

FOLDER = Path(__file__).parent
Tiling = TypeVar("Tiling")
Table = dict[str, dict[str, list[dict[str, Any]]]]


def file_of(name: str) -> Path:
    """The file of a GPU by its torch device name."""
    return FOLDER / ("".join(c if c.isalnum() else "_" for c in name) + ".json")


def find(kind: type[Tiling], op: str, sizes: str, num_tokens: int, device: torch.device) -> Tiling | None:
    """The tuned parameters of an op with these sizes for `num_tokens`, as a `kind`; None without an entry."""
    for entry in _table(device).get(op, {}).get(sizes, ()):
        if num_tokens <= entry["upto"]:
            return kind(**{name: value for name, value in entry.items() if name != "upto"})
    return None


@cache
def _table(device: torch.device) -> Table:
    if device.type != "cuda":
        return {}
    file = file_of(torch.cuda.get_device_name(device))
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
