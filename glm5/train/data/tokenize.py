"""Tokenizes files of texts, conversations or pairs to a token file, with several processes, in the order of the input.

files.py says which files are read, and a row is one of these:

    {"text": ...}                          all tokens count in the loss
    {"messages": ...}, {"token_ids": ...}  a conversation (chat.py), in any form of forms.py
    {"chosen": ..., "rejected": ...}       a pair (pairs.py), which becomes two documents

All rows of a file must be of the kind of its first one: text, conversation or pair; pairs need a token file of their
own. The result does not depend on the number of processes: their results are taken in order.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from glm5.chat.special import END_OF_TEXT
from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import DataError, RequestError
from glm5.common.interrupt import end_with_parent
from glm5.common.progress import Progress
from glm5.train.data.chat import Example, examples_of
from glm5.train.data.files import Batch, batches_of, container_of, files_of
from glm5.train.data.forms import Kind, kind_of_row
from glm5.train.data.pairs import pair_of
from glm5.train.data.tokens import TokenFile, writing

logger = logging.getLogger(__name__)

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


def tokenize(
    files: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], options: Options, processes: int = 1
) -> TokenFile:
    """Write the token file `out` from `files`, with marks if some file holds conversations. Raises `DataError` with
    file and line; nothing is written then."""
    paths = [path for file in files for path in files_of(Path(file))]
    if not paths:
        raise DataError("no files to tokenize were given")
    tokenizer = Tokenizer.from_dir(options.tokenizer)
    total = sum(path.stat().st_size for path in paths)
    about = {
        "files": [Path(file).name for file in files],
        "bytes": total,
        "options": {**vars(options), "tokenizer": None},
    }
    kinds: dict[Path, Kind] = {path: _kind_of(path, options.text_key) for path in paths}
    is_paired = "a pair" in kinds.values()
    if is_paired and (other := next((path for path, kind in kinds.items() if kind != "a pair"), None)) is not None:
        raise DataError(f"{other}: no pairs of answers, unlike other files; both need a token file (or source) each")
    batches: Iterator[tuple[Batch, Kind]] = (
        (batch, kinds[path]) for path in paths for batch in batches_of(path, options.text_key)
    )
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


def _kind_of(path: Path, text_key: str) -> Kind:
    """What the first document of a file is."""
    first = None if container_of(path) == "text" else next(batches_of(path, text_key), None)
    if first is None:
        return "a text"
    row = _parsed(first.documents[0], first.places[0])
    return kind_of_row({key: value for key, value in row.items() if value})


Documents = list[list[tuple[list[int], list[bool] | None]]]
"""For each document of a batch a list of (ids, marks): one for a text, any number for a conversation."""


def _encoded(
    batches: Iterable[tuple[Batch, Kind]], options: Options, processes: int
) -> Iterator[tuple[Batch, Documents]]:
    """Each batch of rows of a kind with its ids, in order, while `processes` encode the next batches."""
    if processes <= 1:
        encode = _encoder(options)
        for batch, kind in batches:
            yield batch, encode(batch, kind)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (options, os.getpid()))
    waiting: deque[tuple[Batch, Future[Documents]]] = deque()
    try:
        for batch, kind in batches:
            waiting.append((batch, pool.submit(_work, batch, kind)))
            if len(waiting) > AHEAD * processes:
                done, future = waiting.popleft()
                yield done, future.result()
        for batch, future in waiting:
            yield batch, future.result()
    except BrokenProcessPool:
        raise DataError("a process that tokenizes was killed (out of memory?); nothing is written") from None
    finally:
        pool.shutdown(cancel_futures=True)


_of_this_process: list[Callable[[Batch, Kind], Documents]] = []


def _begin(options: Options, parent: int) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    _of_this_process[:] = [_encoder(options)]


def _work(batch: Batch, kind: Kind) -> Documents:
    return _of_this_process[0](batch, kind)


def _encoder(options: Options) -> Callable[[Batch, Kind], Documents]:
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


def _encode(
    batch: Batch, expected: Kind, *, tokenizer: Tokenizer, template: ChatTemplate, end: list[int], text_key: str
) -> Documents:
    documents: Documents = []
    for document, place in zip(batch.documents, batch.places, strict=True):
        row = _parsed(document, place)
        kind = kind_of_row(row)
        try:
            if kind == "a text":
                documents.append([(_text_ids(row, tokenizer, text_key, place) + end, None)])
            else:
                found: Sequence[Example] = (pair_of if kind == "a pair" else examples_of)(row, template, place)
                documents.append([(one.ids, one.marks) for one in found])
        except RequestError as error:
            raise DataError(f"{place}: {error}") from None
        except RecursionError:
            raise DataError(f"{place}: nested too deeply") from None
        for ids, _ in documents[-1]:
            if wrong := [token_id for token_id in ids if not 0 <= token_id < tokenizer.vocab_size]:
                raise DataError(f"{place}: token id {wrong[0]}: the tokenizer has 0 to {tokenizer.vocab_size - 1}")
        _check_kind(place, kind, expected)
    return documents


def _text_ids(row: Any, tokenizer: Tokenizer, text_key: str, place: str) -> list[int]:
    """Of a text, or of a row that holds one."""
    if isinstance(row, dict) and text_key not in row:
        there = ", ".join(row) or "nothing"
        raise DataError(f"{place}: no text under {text_key!r}; there is {there:.80}; --text-key takes another key")
    text = row[text_key] if isinstance(row, dict) else row
    if not isinstance(text, str):
        raise DataError(f"{place}: {text_key}: got {json.dumps(text, default=repr):.40}; allowed: a text, in quotes")
    return tokenizer.encode(text, allow_special=False)


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
