"""Data sources: each returns the row of any index, for training or held out. Sources have no state.

ChunkedRows    a token file cut every seq_len tokens; each epoch has another offset and order
PackedRows     a token file packed by best fit; each epoch has another order
PairRows       the same of preference pairs, which are never cut
RulerRows      generated tasks like RULER's            NeedleRows   typed needles
DialogueRows   generated conversations, as many as fit
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from glm5.chat.special import END_OF_TEXT
from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import DataError
from glm5.train.data import needle
from glm5.train.data.dialogues import example
from glm5.train.data.order import Mixture, Permutation, key_of
from glm5.train.data.packing import best_fit, ranges_of
from glm5.train.data.questions import KINDS, NUM_WORDS, Size, conversation
from glm5.train.data.ruler import TASKS, generate, shortest
from glm5.train.data.tokens import TokenFile

Split = Literal["train", "held out"]

TURNS = (1, 2, 5)
FEW_WORDS = 8
"""The least number of words of a recall context; the most is NUM_WORDS."""


@dataclass(frozen=True)
class Row:
    """One sequence: token ids [n], loss weights [n], and the lengths of its documents."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    lengths: list[int]


class Source(Protocol):
    """Rows by index. `name` is for messages; `size` is the number of training rows of an epoch, None if unlimited;
    `holds_out`: whether there are held-out rows."""

    name: str
    holds_out: bool

    @property
    def size(self) -> int | None: ...

    def row(self, index: int, split: Split) -> Row: ...


class _FileRows:
    """Base class of sources that read a token file: the held-out split, and rows from token ranges."""

    def __init__(self, file: TokenFile, seq_len: int, seed: int, held_out: float) -> None:
        self.file, self.seq_len, self.seed = file, seq_len, seed
        self.name, self.holds_out = file.path.name, held_out > 0

    def _row(self, pieces: Sequence[tuple[int, int]]) -> Row:
        file = self.file
        ids = np.concatenate([file.ids_T[a:b] for a, b in pieces]).astype(np.int64)
        if (largest := int(ids.max(initial=0))) > file.largest_id:
            raise DataError(
                f"{file.path}/tokens.bin is damaged: it holds id {largest} in tokens {pieces[0][0]:,} to "
                f"{pieces[-1][1]:,}, and index.json says {file.largest_id} at most; tokenize it again, or copy it anew"
            )
        marks = None if file.marks_T is None else np.concatenate([file.marks_T[a:b] for a, b in pieces])
        weights = np.ones(len(ids), np.float32) if marks is None else marks.astype(np.float32)
        return Row(ids, weights, [length for a, b in pieces for length in file.lengths(a, b)])


def trained_at_first(file: TokenFile, held_out: float) -> int:
    """Tokens before what is held out at the end of a file: complete documents, but a single one is cut."""
    limit = round(file.num_tokens * (1 - held_out))
    documents = int(np.searchsorted(file.ends, limit, side="right"))
    whole = int(file.ends[documents - 1]) if documents else 0
    return whole if whole >= limit / 2 else limit


def held_documents(document_N2: NDArray[np.int64], held_out: float) -> NDArray[np.bool_]:
    """Which of these ranges of tokens are held out: random ones, as far as they fit into the share. [N]"""
    length_N = document_N2[:, 1] - document_N2[:, 0]
    is_held_N = np.zeros(len(length_N), bool)
    left = length_N.sum() * held_out
    for number in np.random.default_rng(0).permutation(len(length_N)) if held_out else ():
        if length_N[number] <= left:
            is_held_N[number] = True
            left -= length_N[number]
    return is_held_N


class ChunkedRows(_FileRows):
    """Chunks of `seq_len` tokens. Each epoch has a random offset, so that documents are cut at other places. The end of
    the file is held out."""

    def __init__(self, file: TokenFile, seq_len: int, seed: int, held_out: float) -> None:
        super().__init__(file, seq_len, seed, held_out)
        self.num_train = trained_at_first(file, held_out)
        self.size = (self.num_train - seq_len + 1) // seq_len if self.num_train > seq_len else 0
        if self.size < 1:
            raise DataError(f"{file.path} has {self.num_train} tokens to train on, fewer than two of seq_len {seq_len}")
        self.num_held = max(0, (file.num_tokens - self.num_train) // seq_len)

    def row(self, index: int, split: Split) -> Row:
        if split == "held out":
            if not self.num_held:
                raise DataError(f"{self.name}: too little is held out for a sequence of {self.seq_len} tokens")
            start = self.num_train + index % self.num_held * self.seq_len
        else:
            epoch, at = divmod(index, self.size)
            key = key_of("cut", self.seed, epoch)
            offset = key % (self.num_train - self.size * self.seq_len + 1)
            start = offset + Permutation(self.size, key)[at] * self.seq_len
        return self._row([(start, start + self.seq_len)])


class PackedRows(_FileRows):
    """Documents packed by best fit. Held out are random documents of the whole file, the same for every seed."""

    def __init__(self, file: TokenFile, seq_len: int, seed: int, held_out: float) -> None:
        super().__init__(file, seq_len, seed, held_out)
        document_N2 = ranges_of(file.ends)
        is_held_N = held_documents(document_N2, held_out)
        num_held = (document_N2[is_held_N, 1] - document_N2[is_held_N, 0]).sum()
        if held_out and num_held < file.num_tokens * held_out / 2:  # the others are longer than what is to be held out
            end = trained_at_first(file, held_out)
            document_N2 = ranges_of(np.union1d(file.ends, [end]))
            is_held_N = document_N2[:, 0] >= end
        self.train = best_fit(document_N2[~is_held_N], seq_len)
        self.held = best_fit(document_N2[is_held_N], seq_len)
        self.size = len(self.train)
        if not self.size:
            raise DataError(f"{file.path} has no tokens to train on")

    def row(self, index: int, split: Split) -> Row:
        if split == "held out":
            if not len(self.held):
                raise DataError(f"{self.name}: nothing is held out")
            return self._row(self.held[index % len(self.held)])
        epoch, at = divmod(index, self.size)
        return self._row(self.train[Permutation(self.size, key_of("fitted", self.seed, epoch))[at]])


class PairRows(PackedRows):
    """Preference pairs packed by best fit: the documents 2i and 2i + 1 of a row are a chosen and a rejected answer.
    Longer pairs than `seq_len` are left out, and `warning` says how many."""

    warning = ""

    def __init__(self, file: TokenFile, seq_len: int, seed: int, held_out: float) -> None:
        _FileRows.__init__(self, file, seq_len, seed, held_out)
        pairs = ranges_of(file.ends[1::2])
        is_held_N, fits_N = held_documents(pairs, held_out), pairs[:, 1] - pairs[:, 0] <= seq_len
        self.train = best_fit(pairs[fits_N & ~is_held_N], seq_len)
        self.held = best_fit(pairs[fits_N & is_held_N], seq_len)
        self.size = len(self.train)
        if not self.size:
            raise DataError(f"{file.path} has no pair of at most {seq_len} tokens to train on; the stage's seq_len")
        if left_out := int((~fits_N).sum()):
            longest = int((pairs[:, 1] - pairs[:, 0]).max())
            self.warning = (
                f"{self.name}: {left_out} of {len(pairs)} pairs are longer than seq_len {seq_len} and left out; the "
                f"longest has {longest} tokens"
            )
        if held_out and not len(self.held):
            raise DataError(
                f"{file.path}: held_out {held_out} of {len(pairs)} pairs is none that fits; give a larger share, or 0"
            )


class RulerRows:
    """Generated tasks, one a row. `learn`: whether only answers count in the loss, or all tokens. `answer_weight`: the
    loss weight of an answer's token; others have 1."""

    size = None
    holds_out = True

    def __init__(
        self,
        tasks: Sequence[str],
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int,
        *,
        min_len: int | None = None,
        learn: Literal["answer", "all"] = "answer",
        questions: int = 1,
        answer_weight: float = 1.0,
    ) -> None:
        if unknown := [task for task in tasks if task not in TASKS]:
            raise DataError(f"tasks: got {unknown[0]!r}; allowed: {', '.join(TASKS)}")
        self.name = "ruler"
        self._tasks, self._tokenizer, self._seed, self._questions = tuple(tasks), tokenizer, seed, questions
        self._weights = (0.0 if learn == "answer" else 1.0, answer_weight)
        self._longest, self._shortest = seq_len - 1, min(seq_len, min_len or seq_len) - 1
        self._end = [token_id] if (token_id := tokenizer.id_of(END_OF_TEXT)) is not None else []
        self._count: Callable[[str], int] = lambda text: len(tokenizer.encode(text, allow_special=False))
        # Prompts and answers are encoded separately, as on a server, which may take two more tokens a question.
        self._lost = 4 + 2 * questions
        for task in tasks:
            if (least := shortest(task, self._count, questions) + self._lost + 1) > self._shortest + 1:
                raise DataError(
                    f"task {task} needs {least} tokens, and rows may have as few as {self._shortest + 1}; "
                    f"set min_len (and seq_len) to {least} or more, or leave the task out"
                )

    def row(self, index: int, split: Split) -> Row:
        seed = key_of(self._seed, split)
        task = self._tasks[index % len(self._tasks)]
        length = Random(key_of(seed, "length", index)).randint(self._shortest, self._longest)
        sample = generate(task, length - self._lost, index, self._count, seed, self._questions)
        ids: list[int] = []
        weights: list[float] = []
        for prompt, answer in ((sample.prompt, sample.answer), *sample.more):
            for text, weight in zip((prompt, answer), self._weights, strict=True):
                encoded = self._tokenizer.encode(text, allow_special=False)
                ids += encoded
                weights += [weight] * len(encoded)
        ids += self._end
        weights += [self._weights[1]] * len(self._end)
        return Row(np.asarray(ids, np.int64), np.asarray(weights, np.float32), [len(ids)])


class DialogueRows:
    """Generated conversations (questions.py), concatenated; the assistant's tokens count in the loss."""

    size = None
    holds_out = True
    name = "questions"

    def __init__(
        self,
        kinds: Sequence[str],
        template: ChatTemplate,
        seq_len: int,
        seed: int,
        *,
        turns: Mapping[str, int] | None = None,
        max_words: int = NUM_WORDS,
    ) -> None:
        for key, given in (("tasks", kinds), ("turns", turns or {})):
            if unknown := [kind for kind in given if kind not in KINDS]:
                raise DataError(f"{key}: got {unknown[0]!r}; allowed: {', '.join(KINDS)}")
        self._kinds, self._template, self._seq_len, self._seed = tuple(kinds) or tuple(KINDS), template, seq_len, seed
        self._turns, self._max_words = turns or {}, max_words

    def row(self, index: int, split: Split) -> Row:
        rng = Random(key_of("questions", self._seed, split, index))
        ids: list[int] = []
        marks: list[bool] = []
        lengths: list[int] = []
        while True:
            kind = self._kinds[len(lengths) % len(self._kinds)]
            turns = self._turns.get(kind) or rng.choice(TURNS)
            size = Size(turns, round(FEW_WORDS * (self._max_words / FEW_WORDS) ** rng.random()))
            split_name = "held-out" if split == "held out" else "train"
            one = example(self._template, conversation(kind, split_name, rng.getrandbits(32), len(lengths), size))
            if lengths and len(ids) + len(one.ids) > self._seq_len:
                return Row(np.asarray(ids, np.int64), np.asarray(marks, np.float32), lengths)
            ids += one.ids[: self._seq_len]
            marks += one.labelled[: self._seq_len]
            lengths.append(min(len(one.ids), self._seq_len))


class NeedleRows:
    """Typed needles of `seq_len` tokens."""

    size = None
    holds_out = True
    name = "needle"

    def __init__(self, seq_len: int, vocab_size: int, seed: int) -> None:
        if vocab_size < needle.VOCAB_SIZE:
            raise DataError(f"typed needles need a vocabulary of {needle.VOCAB_SIZE}, the model has {vocab_size}")
        if seq_len < 3 * needle.NUM_CLASSES:
            raise DataError(f"typed needles need sequences of at least {3 * needle.NUM_CLASSES}, got {seq_len}")
        self._seq_len, self._seed = seq_len, seed

    def row(self, index: int, split: Split) -> Row:
        ids, marks = needle.needles(Random(key_of("needle", self._seed, split, index)), self._seq_len)
        return Row(np.asarray(ids, np.int64), np.asarray(marks, np.float32), [len(ids)])


class MixedRows:
    """A mixture of sources in proportion to their weights: the rows of a stage by index. Held-out rows come from the
    sources that have some; `holds_out`: whether there are any."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], seed: int) -> None:
        held = [(source, weight) for source, weight in zip(sources, weights, strict=True) if source.holds_out]
        self.holds_out = bool(held)
        self._all = tuple(sources), Mixture(weights, seed)
        self._held = tuple(source for source, _ in held), Mixture([weight for _, weight in held] or weights, seed)
        self._ask = lru_cache(maxsize=1)(self._row)

    def row(self, draw: int, split: Split = "train") -> Row:
        return self._ask(draw, split)

    @property
    def warnings(self) -> list[str]:
        """What a user should know of the sources."""
        return [one.warning for one in self._all[0] if isinstance(one, PairRows) and one.warning]

    def where(self, draw: int) -> str:
        """The source and row of a training draw, for messages."""
        sources, mixture = self._all
        source, index = mixture[draw]
        return f"{sources[source].name} row {index}"

    def _row(self, draw: int, split: Split) -> Row:
        sources, mixture = self._all if split == "train" else self._held
        source, index = mixture[draw]
        return sources[source].row(index, split)
