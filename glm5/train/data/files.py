"""Files of training data as batches of documents, read as streams.

    .json, .jsonl, .ndjson     an object a line; or one array of objects, where the first character is [
    Parquet, Arrow             a row a document; known by their first bytes (extra `data`)
    any other file             one document, UTF-8
    gzip, zstd                 each of these but Parquet and Arrow; known by their first bytes (zstd: extra `data`)
    a folder                   of `datasets` (`save_to_disk`), or the Parquet files in it and in its folders

What is read at once is bounded: a row, a text, and what a compressed file unpacks to. Every error is a `DataError` that
names the file and, in it, the line or row.
"""

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from glm5.common.bounded import MIB, SETTINGS, open_regular, read_bounded_text
from glm5.common.errors import DataError
from glm5.common.extras import require
from glm5.train.data.forms import COLUMNS

BATCH_BYTES = 1 << 18
ROW = 64 * MIB
"""Limit for the text of a row."""
BLANK = MIB
"""Limit for empty lines one after another."""
TEXT = 1024 * MIB
"""Limit for a file that is one text."""
UNPACKED, RATIO = 256 * MIB, 100
"""A compressed file may unpack to the first of these, and beyond to that many times its size. Text reaches 3 to 20."""
ROWS = 64
"""Rows of a table that become Python objects at once."""

_ROW_ENDINGS = (".json", ".jsonl", ".ndjson")
_STREAM = b"\xff\xff\xff\xff"
_SKIPPED = b"\x2a\x4d\x18"
_MAGIC: dict[bytes, Literal["gzip", "zstd", "parquet", "arrow"]] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    _STREAM: "arrow",
}
_SPLIT = re.compile(r"(.+?)-\d{5}-of-\d{5}\.parquet")
_SPACE = re.compile(r"[ \t\r\n]*")
_CHARACTERS = 1 << 18  # of an array that are read at once
_CUT = 16  # characters before the end of what was read in which an error may come from that end

Container = Literal["rows", "text", "parquet", "arrow"]


@dataclass(frozen=True)
class Batch:
    """Documents of one file (bytes of lines, texts or rows), the place of each for messages, and their share of the
    file in bytes."""

    documents: list[Any]
    places: list[str]
    num_bytes: int


def files_of(path: Path) -> list[Path]:
    """The files that a path stands for: itself, or those of a folder of data. Raises `DataError`."""
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"{path}: no such file")
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = _listed(path / "dataset_dict.json", "splits")
        if len(splits) != 1:
            shown = ", ".join(str(path / name) for name in splits)
            raise DataError(f"{path}: holds several splits, of which some may be held out; name one of {shown}")
        return files_of(path / splits[0])
    if (path / "state.json").is_file():
        return [path / name for name in _listed(path / "state.json", "_data_files", "filename")]
    found = sorted(file for file in path.rglob("*.parquet") if not file.name.startswith((".", "_")))
    splits = sorted({match[1] for file in found if (match := _SPLIT.fullmatch(file.name))})
    if len(splits) > 1:
        raise DataError(
            f"{path}: holds files of {', '.join(splits)}, of which some may be held out; name files, such as "
            f"{found[0].parent}/{splits[-1]}-*.parquet"
        )
    if not found:
        raise DataError(
            f"{path}: is a folder without Parquet files, and none of `datasets`; name files, such as {path}/*.jsonl"
        )
    return found


def _listed(file: Path, key: str, each: str | None = None) -> list[str]:
    """Names in a JSON file of `datasets`: of files or folders beside it."""
    try:
        found = json.loads(read_bounded_text(file, SETTINGS, DataError))[key]
        names = [one if each is None else one[each] for one in found]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise DataError(f"{file} is damaged: {error!r:.80}") from None
    for name in names:
        is_name = isinstance(name, str) and Path(name).name == name and name not in ("", "..")
        if not is_name or not os.path.exists(file.parent / name):  # also False for a name that is too long
            raise DataError(f"{file} names {name!r:.60}, which is not there")
    if not names:
        raise DataError(f"{file} names no data")
    return names


def container_of(path: Path) -> Container:
    """What a file holds. Raises `DataError`, and MissingExtra where reading it needs a package that is not there."""
    with _opened(path) as raw:
        kind = _magic(raw)
    if kind in ("zstd", "parquet", "arrow") or path.suffix in (".parquet", ".arrow"):
        require("pyarrow", "data")
    if kind in ("parquet", "arrow"):
        return kind
    if path.suffix in (".parquet", ".arrow"):
        raise DataError(f"{path}: cannot be read as {path.suffix[1:].capitalize()}: it begins as none does")
    name = path.name.removesuffix(".gz").removesuffix(".zst") if kind else path.name
    return "rows" if name.endswith(_ROW_ENDINGS) else "text"


def batches_of(path: Path, text_key: str) -> Iterator[Batch]:
    """The documents of a file. `text_key`: the column of texts. Raises `DataError`."""
    container = container_of(path)
    if container in ("parquet", "arrow"):
        yield from _of_table(path, _parquet if container == "parquet" else _arrow, text_key)
        return
    with ExitStack() as stack:
        raw = stack.enter_context(_opened(path))
        packing = _magic(raw)
        file = stack.enter_context(_unpacked(raw, path, packing)) if packing else raw
        if container == "text":
            yield _text(file, path)
            return
        done = 0
        for documents, places in _of_array(file, path) if _is_array(file) else _of_lines(file, path):
            at = raw.tell()
            yield Batch(documents, places, at - done)
            done = at


def _opened(path: Path) -> io.BufferedReader:
    try:
        return cast("io.BufferedReader", open_regular(path, DataError))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _magic(file: BinaryIO) -> Literal["gzip", "zstd", "parquet", "arrow"] | None:
    begin = file.read(8)
    file.seek(0)
    if begin[1:4] == _SKIPPED and 0x50 <= begin[0] < 0x60:  # before the data, as pzstd writes it
        return "zstd"
    return next((kind for magic, kind in _MAGIC.items() if begin.startswith(magic)), None)


class _Unpacked(io.RawIOBase):
    """What a compressed file holds, up to a limit."""

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream, self._path, self._left = stream, path, max(UNPACKED, RATIO * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            count = self._stream.readinto(buffer)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"{self._path}: cannot be unpacked ({reason}): it is damaged, or its window is above 128 MiB; unpack "
                "it by the program that packed it, or copy it anew"
            ) from None
        self._left -= count
        if self._left < 0:
            raise DataError(
                f"{self._path}: unpacks to more than {UNPACKED // MIB} MiB and {RATIO} times its size, as no text "
                "does; if it is what you mean to train on, unpack it first"
            )
        return count


def _unpacked(raw: BinaryIO, path: Path, packing: str) -> io.BufferedReader:
    if packing == "gzip":
        return io.BufferedReader(_Unpacked(gzip.GzipFile(fileobj=raw), path), BATCH_BYTES)
    arrow = require("pyarrow", "data")
    return io.BufferedReader(_Unpacked(arrow.CompressedInputStream(arrow.PythonFile(raw), "zstd"), path), BATCH_BYTES)


def _text(file: BinaryIO, path: Path) -> Batch:
    pieces: list[bytes] = []
    size = 0
    while piece := file.read(MIB):
        pieces.append(piece)
        size += len(piece)
        if size > TEXT:
            raise DataError(
                f"{path}: more than {TEXT // MIB} MiB in one text; split it, or write a document a row (.jsonl)"
            )
    try:
        return Batch([b"".join(pieces).decode()], [str(path)], path.stat().st_size)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _is_array(file: io.BufferedReader) -> bool:
    return file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


Rows = Iterator[tuple[list[Any], list[str]]]
"""(documents, their places)."""


def _of_lines(file: BinaryIO, path: Path) -> Rows:
    lines: list[bytes] = []
    places: list[str] = []
    number = size = blank = 0
    while line := file.readline(ROW + 1):
        number += 1
        size += len(line)
        blank = 0 if line.strip() else blank + len(line)
        if len(line) > ROW:
            raise DataError(f"{path}, line {number}: longer than {ROW // MIB} MiB, the most that a row may have")
        if blank > BLANK:
            raise DataError(f"{path}, line {number}: behind {BLANK // MIB} MiB of empty lines; take them out")
        if not blank:
            lines.append(line)
            places.append(f"{path}, line {number}")
        if size >= BATCH_BYTES and lines:
            yield lines, places
            lines, places, size = [], [], 0
    if lines:
        yield lines, places


def _of_array(file: BinaryIO, path: Path) -> Rows:
    """The objects of one array, which may be larger than memory."""
    text = _Characters(file, path)
    rows: list[Any] = []
    places: list[str] = []
    number, begin = 0, text.done
    text.next()
    text.at += 1  # behind the [
    ends = text.next() == "]"
    text.at += ends
    while not ends:
        number += 1
        place = f"{path}, row {number}"
        rows.append(text.row(place))
        places.append(place)
        separator = text.next()
        if separator not in (",", "]"):
            raise DataError(f"{place}: behind it is {text.shown}; allowed: a comma, or ] at the end of the array")
        text.at += 1
        ends = separator == "]"
        if ends or text.done - begin >= BATCH_BYTES:
            yield rows, places
            rows, places, begin = [], [], text.done
    if text.next():
        raise DataError(f"{path}: behind the array is {text.shown}; allowed: one array, or an object a line")


class _Characters:
    """The text of a file, read as it is needed. `at`: the place that is reached in `text`, a piece of it."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.text, self.at = "", 0
        self._file, self._path, self._before = file, path, 0
        self._utf8, self._decode = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode

    @property
    def done(self) -> int:
        """Characters before `at`."""
        return self._before + self.at

    @property
    def shown(self) -> str:
        """What follows, for messages."""
        return repr(self.text[self.at : self.at + 20]) if self.text[self.at :] else "the end of the file"

    def next(self) -> str:
        """The next character that is no space, at `at`; empty at the end."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None, "it matches nothing, too"
            self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more(_CHARACTERS):
                return ""

    def row(self, place: str) -> dict[str, Any]:
        """The object that begins at the next character. `at` is behind it then."""
        if self.next() != "{":
            raise DataError(f"{place}: not a JSON object but {self.shown}; the rows of an array are objects")
        while True:
            try:
                row, self.at = self._decode(self.text, self.at)
                return row
            except RecursionError as error:
                raise DataError(f"{place}: not a JSON object: {error}") from None
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - _CUT
                if is_cut and len(self.text) - self.at > ROW:
                    raise DataError(f"{place}: longer than {ROW // MIB} MiB, the most that a row may have") from None
                if not is_cut or not self._more(max(_CHARACTERS, len(self.text) - self.at)):
                    raise DataError(f"{place}: not a JSON object: {error.msg}") from None
            except ValueError as error:  # a number of thousands of digits
                raise DataError(f"{place}: not a JSON object: {error}") from None

    def _more(self, num_bytes: int) -> bool:
        """Read on. False at the end of the file."""
        found = self._file.read(num_bytes)
        try:
            piece = self._utf8.decode(found, final=not found)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: not UTF-8 text: {error.reason}") from None
        self._before += self.at
        self.text, self.at = self.text[self.at :] + piece, 0
        return bool(found)


Records = Iterator[tuple[Any, int]]
"""(record batch, bytes of the file that it and those before take)."""


def _of_table(path: Path, read: Callable[[Path, str], Records], text_key: str) -> Iterator[Batch]:
    arrow = require("pyarrow", "data")
    seen = done = 0
    try:
        for records, at in read(path, text_key):
            first = 0
            while first < records.num_rows:
                some = records.slice(first, ROWS)
                if some.nbytes > ROW:
                    some = some.slice(0, 1)
                first += some.num_rows
                places = [f"{path}, row {seen + i + 1}" for i in range(some.num_rows)]
                if some.nbytes > ROW:
                    raise DataError(f"{places[0]}: longer than {ROW // MIB} MiB, the most that a row may have")
                yield Batch([_without_nulls(row) for row in some.to_pylist()], places, at - done)
                seen, done = seen + some.num_rows, at
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:  # values that Python cannot hold
        raise DataError(f"{path}: cannot be read as a table: {str(error).partition(chr(10))[0]}") from None


def _parquet(path: Path, text_key: str) -> Records:
    parquet = require("pyarrow.parquet", "data")
    size, seen = path.stat().st_size, 0
    with parquet.ParquetFile(path, buffer_size=MIB) as file:  # of a row group, only what is near is in memory
        columns = _columns(path, file.schema_arrow.names, text_key)
        for records in file.iter_batches(batch_size=ROWS, columns=columns):
            seen += records.num_rows
            yield records, size * seen // max(1, file.metadata.num_rows)


def _arrow(path: Path, text_key: str) -> Records:
    """Of Arrow's stream format, which `datasets` writes, and of its file format."""
    arrow, ipc = require("pyarrow", "data"), require("pyarrow.ipc", "data")
    with _opened(path) as raw:
        is_stream = raw.read(4) == _STREAM
    with arrow.memory_map(str(path)) as source:
        reader = ipc.open_stream(source) if is_stream else ipc.open_file(source)
        columns = _columns(path, reader.schema.names, text_key)
        of = 0 if is_stream else reader.num_record_batches
        for number, records in enumerate(reader if is_stream else map(reader.get_batch, range(of)), 1):
            wanted = records.select(columns)
            wanted.validate(full=True)  # offsets of a damaged file may point anywhere
            yield wanted, source.tell() if is_stream else source.size() * number // of


def _columns(path: Path, there: list[str], text_key: str) -> list[str]:
    columns = [name for name in (text_key, *COLUMNS) if name in there]
    if not columns:
        raise DataError(f"{path}: no column {text_key!r}; there are {', '.join(there):.80}")
    if double := next((name for name in columns if there.count(name) > 1), None):
        raise DataError(f"{path}: has {there.count(double)} columns {double!r}; allowed: one")
    return columns


def _without_nulls(value: Any) -> Any:
    """Remove null values at any depth: tables store absent keys as null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
