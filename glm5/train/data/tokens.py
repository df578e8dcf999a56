"""Token files: a folder with concatenated documents, read through memory maps.

    index.json    format, element type, counts, the largest id, how it was made, and whether its documents are pairs of
                  answers (pairs.py), the chosen one first
    tokens.bin    ids, little-endian uint16 or uint32
    ends.bin      for each document the position after its last token, int64
    marks.bin     for each token whether it counts in the loss (SFT), uint8; absent if all do

The folder is written atomically. File sizes are checked against index.json on opening, so that a truncated file is
reported at once and not at the step that would read beyond its end.
"""

import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5.common.atomic import atomic_dir, atomic_write
from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import DataError

FORMAT, VERSION = "glm5 tokens", 1
_TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class TokenFile:
    """A token file, memory-mapped: `ids_T` and `marks_T` of all tokens, `ends` of documents."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises `DataError` when the folder is not a token file, or a file in it is missing, truncated or too long."""
        self.path = Path(path)
        index = _read_index(self.path)
        self.num_tokens: int = index["num_tokens"]
        self.num_documents: int = index["num_documents"]
        self.largest_id: int = index["largest_id"]
        self.paired: bool = index.get("paired", False)
        self.about: dict[str, Any] = index["about"]
        self.ids_T = self._map("tokens.bin", _TYPES[index["dtype"]], self.num_tokens)
        self.ends = self._map("ends.bin", np.dtype("<i8"), self.num_documents)
        self.marks_T = self._map("marks.bin", np.dtype("u1"), self.num_tokens) if index["marked"] else None
        if self.num_documents and int(self.ends[-1]) != self.num_tokens:
            raise DataError(f"{self.path}: ends.bin is damaged: documents end at {int(self.ends[-1])}, not at the end")

    def _map(self, name: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        file = self.path / name
        wanted = count * dtype.itemsize
        try:
            found = file.stat().st_size
            if found != wanted:
                kind = "truncated" if found < wanted else "too long"
                raise DataError(
                    f"{file} is {kind}: {found:,} bytes, and index.json says {wanted:,}; "
                    "tokenize it again, or copy it anew"
                )
            return np.memmap(file, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from None

    def lengths(self, start: int, stop: int) -> list[int]:
        """Lengths of the documents' parts in the tokens start..stop."""
        first, last = np.searchsorted(self.ends, [start, stop], side="right")
        cuts = [start, *(int(end) for end in self.ends[first:last] if start < end < stop), stop]
        return [b - a for a, b in pairwise(cuts)]

    def check_vocabulary(self, vocab_size: int) -> None:
        """`DataError` when some id has no row in an embedding of that size."""
        if self.largest_id >= vocab_size:
            raise DataError(
                f"{self.path} holds token id {self.largest_id}, and the model has ids 0 to {vocab_size - 1}: "
                f"tokenize with the model's tokenizer, or for a new model set model.config.vocab_size above "
                f"{self.largest_id}"
            )


class TokenWriter:
    """Writes documents one by one; created by `writing`."""

    def __init__(self, building: Path, vocab_size: int, *, marked: bool, paired: bool) -> None:
        self.dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self.vocab_size, self.marked, self.paired = vocab_size, marked, paired
        self.num_tokens = self.largest_id = 0
        self._ends: list[int] = []
        self._building = building
        self._tokens = (building / "tokens.bin").open("wb")
        self._marks = (building / "marks.bin").open("wb") if marked else None

    def add(self, ids: Sequence[int], marks: Sequence[bool] | None = None) -> None:
        """Add a document; empty ones are skipped. `marks`: which tokens count in the loss, by default all."""
        if not len(ids):
            return
        array = np.asarray(ids, np.int64)
        largest = int(array.max())
        if int(array.min()) < 0 or largest >= self.vocab_size:
            raise DataError(f"token ids must be in 0..{self.vocab_size - 1}, got {int(array.min())}..{largest}")
        self._tokens.write(array.astype(_TYPES[self.dtype]).tobytes())
        if self._marks is not None:
            flags = np.ones(len(array), "u1") if marks is None else np.asarray(marks, "u1")
            if len(flags) != len(array):
                raise DataError(f"{len(flags)} marks for {len(array)} tokens")
            self._marks.write(flags.tobytes())
        self.num_tokens += len(array)
        self.largest_id = max(self.largest_id, largest)
        self._ends.append(self.num_tokens)

    def close(self, about: dict[str, Any]) -> None:
        for handle in (self._tokens, self._marks):
            if handle is not None:
                handle.flush()
                os.fsync(handle.fileno())
        with atomic_write(self._building / "ends.bin", "wb") as handle:
            handle.write(np.asarray(self._ends, "<i8").tobytes())
        index = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype,
            "num_tokens": self.num_tokens,
            "num_documents": len(self._ends),
            "largest_id": self.largest_id,
            "marked": self.marked,
            "paired": self.paired,
            "about": about,
        }
        with atomic_write(self._building / "index.json") as handle:
            json.dump(index, handle, indent=2)
            handle.write("\n")

    def abandon(self) -> None:
        for handle in (self._tokens, self._marks):
            if handle is not None:
                handle.close()


@contextmanager
def writing(
    path: str | os.PathLike[str],
    vocab_size: int,
    *,
    marked: bool = False,
    paired: bool = False,
    about: dict[str, Any] | None = None,
) -> Generator[TokenWriter, None, None]:
    """A writer of the token file `path`, which is created when the block ends without an error.

    Raises `DataError` for a folder that is not empty or has no name, a full disk, and if there are no documents.
    """
    target = Path(path)
    if target.name in ("", ".."):
        raise DataError(f"got {path!s} as the folder to write; it is made as a whole: give one by name, such as tokens")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"{target} is there already, and would be lost; move it away, or give another folder")
    try:
        with atomic_dir(target) as building:
            writer = TokenWriter(building, vocab_size, marked=marked, paired=paired)
            try:
                yield writer
                if not writer.num_tokens:
                    raise DataError(f"{target}: no tokens came out of the input; nothing is written")
                writer.close(about or {})
            finally:
                writer.abandon()
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{target}: writing failed: {reason}; what was there before is unchanged") from error


def _read_index(path: Path) -> dict[str, Any]:
    file = path / "index.json"
    try:
        index = json.loads(read_bounded_text(file, SETTINGS, DataError))
    except OSError as error:
        raise DataError(f"{path} is no token file ({file}: {error.strerror}); `glm5 tokenize` writes one") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is damaged: {error}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise DataError(f"{file} is not the index of a token file")
    if index.get("version") != VERSION:
        raise DataError(f"{file}: version {index.get('version')!r}, this program reads {VERSION}")
    wanted = {"num_tokens": int, "num_documents": int, "largest_id": int, "marked": bool, "dtype": str, "about": dict}
    for key, kind in wanted.items():
        if type(index.get(key)) is not kind or (kind is int and index[key] < 0):
            raise DataError(f"{file} is damaged: {key} is {index.get(key)!r:.60}")
    if type(index.get("paired", False)) is not bool:
        raise DataError(f"{file} is damaged: paired is {index['paired']!r:.60}")
    if index["dtype"] not in _TYPES:
        raise DataError(f"{file} is damaged: dtype is {index['dtype']!r}")
    return index
