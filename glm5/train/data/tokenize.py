"""Tokenizes JSONL, Parquet and text files to a token file, with several processes, in the order of the input.

    .jsonl     one object a line: {"text": ...}, a row of chat.py ({"messages": ...}, {"token_ids": ...}), or one of
               pairs.py ({"chosen": ..., "rejected": ...}), which becomes two documents
    .parquet   the same as columns (needs the extra `data`)
    others     one document a file, UTF-8

All rows of a file must be of the kind of its first one: text, conversation or pair; pairs need a token file of their
own. All tokens of a text count in the loss. The result does not depend on the number of processes: their results are
taken in order.
"""

import json
import logging
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from glm5.chat.special import END_OF_TEXT
from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import DataError, RequestError
from glm5.common.extras import require
from glm5.common.interrupt import end_with_parent
from glm5.common.progress import Progress
from glm5.train.data.chat import Example, examples_of
from glm5.train.data.pairs import KEYS, is_pair, pair_of
from glm5.train.data.tokens import TokenFile, writing

logger = logging.getLogger(__name__)

Kind = Literal["a text", "a conversation", "a pair"]

BATCH_BYTES = 1 << 18
AHEAD = 4  # queued batches for each process


@dataclass(frozen=True)
class Options:
    """How documents become ids; `tokenizer` is a checkpoint's folder."""

    tokenizer: str
    text_key: str = "text"
    end_token: str | None = END_OF_TEXT
    """Appended to each text; conversations end as in their template."""
    chat_template: str | None = None
    allow_control_tokens: bool = False
    """See `ChatTemplate`: special tokens spelt in messages are encoded as such, not as text."""


@dataclass(frozen=True)
class _Batch:
    """Documents of one file (bytes of lines, texts or rows), the place of each for messages, their share of the input
    in bytes, and the kind of the file's rows."""

    documents: list[Any]
    places: list[str]
    num_bytes: int
    kind: Kind = "a text"


def tokenize(
    files: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], options: Options, processes: int = 1
) -> TokenFile:
    """Write the token file `out` from `files`, with marks if some file holds conversations. Raises `DataError` with
    file and line; nothing is written then."""
    paths = [_checked(Path(file)) for file in files]
    if not paths:
        raise DataError("no files to tokenize were given")
    tokenizer = Tokenizer.from_dir(options.tokenizer)
    total = sum(path.stat().st_size for path in paths)
    about = {"files": [path.name for path in paths], "bytes": total, "options": {**vars(options), "tokenizer": None}}
    kinds = {path: _kind_of(path, options.text_key) for path in paths}
    is_paired = "a pair" in kinds.values()
    if is_paired and (other := next((path for path, kind in kinds.items() if kind != "a pair"), None)) is not None:
        raise DataError(f"{other}: no pairs of answers, unlike other files; both need a token file (or source) each")
    batches = (replace(batch, kind=kinds[path]) for path in paths for batch in _batches(path, options.text_key))
    is_marked = set(kinds.values()) != {"a text"}
    with (
        writing(out, tokenizer.vocab_size, marked=is_marked, paired=is_paired, about=about) as writer,
        Progress(total, "B", f"tokenizing {len(paths)} files") as progress,
    ):
        silent: list[str] = []
        for batch, documents in _encoded(batches, options, processes):
            for place, parts in zip(batch.places, documents, strict=True):
                if not parts:
                    silent.append(place)
                for ids, marks in parts:
                    writer.add(ids, marks)
            progress.update(batch.num_bytes, tokens=writer.num_tokens)
    if silent:
        logger.warning("left out: %d rows in which nothing is to be learnt, the first at %s", len(silent), silent[0])
    return TokenFile(out)


def _checked(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name files in it, such as {path}/*.jsonl")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix == ".parquet":
        require("pyarrow.parquet", "data")
    return path


def _kind_of(path: Path, text_key: str) -> Kind:
    """What the first document of a file is."""
    first = next(_batches(path, text_key), None) if path.suffix in (".jsonl", ".parquet") else None
    if first is None:
        return "a text"
    row = _parsed(first.documents[0], first.places[0])
    return _kind_of_row({key: value for key, value in row.items() if value} if isinstance(row, dict) else row)


def _kind_of_row(row: Any) -> Kind:
    if is_pair(row):  # published pairs may also have messages
        return "a pair"
    return "a conversation" if isinstance(row, dict) and ("messages" in row or "token_ids" in row) else "a text"


def _batches(path: Path, text_key: str) -> Iterator[_Batch]:
    if path.suffix == ".parquet":
        return _of_parquet(path, text_key)
    return _of_lines(path) if path.suffix == ".jsonl" else _of_text(path)


def _of_lines(path: Path) -> Iterator[_Batch]:
    lines: list[bytes] = []
    places: list[str] = []
    size = 0
    with path.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            size += len(line)
            if line.strip():
                lines.append(line)
                places.append(f"{path}, line {number}")
            if size >= BATCH_BYTES and lines:
                yield _Batch(lines, places, size)
                lines, places, size = [], [], 0
    if lines:
        yield _Batch(lines, places, size)


def _of_text(path: Path) -> Iterator[_Batch]:
    content = path.read_bytes()
    try:
        yield _Batch([content.decode()], [str(path)], len(content))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _of_parquet(path: Path, text_key: str) -> Iterator[_Batch]:
    parquet = require("pyarrow.parquet", "data")
    arrow = require("pyarrow", "data")
    try:
        file = parquet.ParquetFile(path)
        wanted = [text_key, "messages", "tools", "thinking", "token_ids", "loss_mask", "reasoning_effort"]
        wanted += KEYS if is_pair(dict.fromkeys(file.schema_arrow.names)) else []
        columns = [name for name in wanted if name in file.schema_arrow.names]
        if not columns:
            raise DataError(f"{path}: no column {text_key!r}; there are {', '.join(file.schema_arrow.names)}")
        share, seen = path.stat().st_size / max(1, file.metadata.num_rows), 0
        for records in file.iter_batches(batch_size=256, columns=columns):
            rows = [_without_nulls(row) for row in records.to_pylist()]
            places = [f"{path}, row {seen + i + 1}" for i in range(len(rows))]
            yield _Batch(rows, places, round(share * (seen + len(rows))) - round(share * seen))
            seen += len(rows)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from None


def _without_nulls(value: Any) -> Any:
    """Remove null values at any depth: Parquet stores absent keys as null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


Documents = list[list[tuple[list[int], list[bool] | None]]]
"""For each document of a batch a list of (ids, marks): one for a text, any number for a conversation."""


def _encoded(batches: Iterable[_Batch], options: Options, processes: int) -> Iterator[tuple[_Batch, Documents]]:
    """Each batch with its ids, in order, while `processes` encode the next batches."""
    if processes <= 1:
        encode = _encoder(options)
        for batch in batches:
            yield batch, encode(batch)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (options, os.getpid()))
    waiting: deque[tuple[_Batch, Future[Documents]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_work, batch)))
            if len(waiting) > AHEAD * processes:
                done, future = waiting.popleft()
                yield done, future.result()
        for batch, future in waiting:
            yield batch, future.result()
    except BrokenProcessPool:
        raise DataError("a process that tokenizes was killed (out of memory?); nothing is written") from None
    finally:
        pool.shutdown(cancel_futures=True)


_of_this_process: list[Callable[[_Batch], Documents]] = []


def _begin(options: Options, parent: int) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    _of_this_process[:] = [_encoder(options)]


def _work(batch: _Batch) -> Documents:
    return _of_this_process[0](batch)


def _encoder(options: Options) -> Callable[[_Batch], Documents]:
    tokenizer = Tokenizer.from_dir(options.tokenizer)
    template = ChatTemplate.for_checkpoint(
        options.tokenizer,
        override=options.chat_template,
        tokenizer=tokenizer,
        allow_control_tokens=options.allow_control_tokens,
    )
    end: list[int] = []
    if options.end_token is not None:
        token_id = tokenizer.id_of(options.end_token)
        if token_id is None:
            raise DataError(
                f"the tokenizer of {options.tokenizer} has no token {options.end_token!r} to end texts with"
            )
        end = [token_id]
    return partial(_encode, tokenizer=tokenizer, template=template, end=end, text_key=options.text_key)


def _encode(batch: _Batch, *, tokenizer: Tokenizer, template: ChatTemplate, end: list[int], text_key: str) -> Documents:
    documents: Documents = []
    for document, place in zip(batch.documents, batch.places, strict=True):
        row = _parsed(document, place)
        kind = _kind_of_row(row)
        if kind != "a text":
            found: Sequence[Example] = (pair_of if kind == "a pair" else examples_of)(row, template, place)
            if wrong := [token_id for one in found for token_id in one.ids if not 0 <= token_id < tokenizer.vocab_size]:
                raise DataError(f"{place}: token id {wrong[0]}: the tokenizer has 0 to {tokenizer.vocab_size - 1}")
            _check_kind(place, kind, batch.kind)
            documents.append([(example.ids, example.marks) for example in found])
            continue
        if isinstance(row, dict) and text_key not in row:
            there = ", ".join(row) or "nothing"
            raise DataError(f"{place}: no text under {text_key!r}; there is {there:.80}; --text-key takes another key")
        text = row[text_key] if isinstance(row, dict) else row
        if not isinstance(text, str):
            raise DataError(f"{place}: {text_key}: got {json.dumps(text):.40}; allowed: a text, in quotes")
        _check_kind(place, kind, batch.kind)
        try:
            documents.append([(tokenizer.encode(text, allow_special=False) + end, None)])
        except RequestError as error:
            raise DataError(f"{place}: {error}") from None
    return documents


def _check_kind(place: str, kind: Kind, expected: Kind) -> None:
    if kind != expected:
        raise DataError(
            f"{place}: {kind}, unlike the first row of the file, {expected}; texts, of which every token is learnt, "
            "conversations, of which the answers are, and pairs of answers need a file each"
        )


def _parsed(document: Any, place: str) -> Any:
    if not isinstance(document, bytes):
        return document
    try:
        row = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: not a JSON object but {type(row).__name__}")
    return row
