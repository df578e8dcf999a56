"""Generated questions for training and evaluating small models. The same (kind, split, seed, index) gives the same.

    copy      Repeat KDXAM                                 KDXAM; in training also a field or number of tool calls
    sort      Sort KDXAM                                   ADKMX
    think     Which letter of KDXAM comes last?            thinks ADKMX, then answers X
    recall    Read: <a long list of words>. Which colour?  finds the one colour, in a context far over index_topk
    tool      What is the colour of KDXAM?                 calls lookup(item="KDXAM", field="colour"), then answers
              Order 7 of KDXAM                             calls order(item="KDXAM", count=7), then answers

Training and held-out questions are disjoint for all seeds: a checksum of a question's content (the set of letters, the
list of words) decides the split that it belongs to.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Split = Literal["train", "held-out"]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ENDS = {"first": 0, "last": -1}
NUM_LETTERS = 5
HELD_OUT_SHARE = 8  # one question in so many is never trained on

TOPICS: dict[str, tuple[str, ...]] = {
    "colour": ("red", "blue", "green", "black", "white", "pink"),
    "animal": ("cat", "dog", "horse", "sheep", "bear", "duck"),
    "fruit": ("apple", "pear", "plum", "lemon", "peach", "mango"),
    "city": ("Paris", "Rome", "Oslo", "Cairo", "Lima", "Delhi"),
    "number": ("3", "4", "5", "6", "7", "8"),
}
FILLER: tuple[str, ...] = (
    "the", "and", "then", "with", "some", "more", "over", "under", "near", "from", "here", "there",
    "house", "road", "table", "water", "stone", "paper", "door", "light", "cloud", "night", "chair", "glass",
)  # fmt: skip
NUM_WORDS = 120
LOOKUP_FIELDS = ("colour", "fruit", "city")
COPIED_WORDS = (*LOOKUP_FIELDS, *TOPICS["number"])
"""Arguments of tool calls. After a space they are other tokens than in a call; copying them teaches which belong
together, which tool calls alone often do not (docs/log.md, 2026-11-26)."""
COPIED_SHARE = 0.6  # of the copy questions that are trained on


@dataclass(frozen=True)
class Call:
    """The tool call that a turn must end in, and what the tool answers."""

    name: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True)
class Turn:
    """One user message and the expected reply."""

    user: str
    answer: str
    thought: str = ""
    call: Call | None = None


@dataclass(frozen=True)
class Conversation:
    """A question, and in training often further ones of its kind. `thinking`: whether the model may think first."""

    kind: str
    turns: tuple[Turn, ...]
    thinking: bool
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Size:
    """The size of a conversation: its turns, and the words of a recall context."""

    turns: int = 1
    words: int = NUM_WORDS


FULL = Size()


def conversation(kind: str, split: Split, seed: int, index: int, size: Size = FULL) -> Conversation:
    """Number `index` of its kind; the held-out questions are those of `FULL` size."""
    return KINDS[kind](Random(f"{kind} {split} {seed} {index}"), split, size)


def _allowed(essence: str, split: Split) -> bool:
    return (zlib.crc32(essence.encode()) % HELD_OUT_SHARE == 0) == (split == "held-out")


def _letters(rng: Random, split: Split) -> str:
    while True:
        letters = "".join(rng.sample(LETTERS, NUM_LETTERS))
        if _allowed("".join(sorted(letters)), split):
            return letters


def _spelling(kind: str, ask: str, answer: Callable[[str], str]) -> Callable[[Random, Split, Size], Conversation]:
    def make(rng: Random, split: Split, size: Size) -> Conversation:
        words = [_letters(rng, split) for _ in range(size.turns)]
        if kind == "copy" and split == "train" and rng.random() < COPIED_SHARE:
            words = [rng.choice(COPIED_WORDS) for _ in words]
        turns = tuple(Turn(f"{ask} {word}", answer(word)) for word in words)
        return Conversation(kind, turns, thinking=rng.random() < 0.5)

    return make


def _think(rng: Random, split: Split, _size: Size) -> Conversation:
    # One turn: the template drops the thoughts of earlier turns, so there would be nothing to learn them from.
    letters, end = _letters(rng, split), rng.choice(list(ENDS))
    thought = "".join(sorted(letters))
    turn = Turn(f"Which letter of {letters} comes {end}?", thought[ENDS[end]], thought)
    return Conversation("think", (turn,), thinking=True)


def _recall(rng: Random, split: Split, size: Size) -> Conversation:
    while True:
        words = rng.choices(FILLER, k=size.words)
        hidden = {topic: rng.choice(values) for topic, values in TOPICS.items()}
        for place, value in zip(rng.sample(range(size.words), len(hidden)), hidden.values(), strict=True):
            words[place] = value
        if _allowed(" ".join(words), split):
            break
    chosen = rng.sample(list(hidden.items()), min(size.turns, len(hidden)))
    turns = [Turn(f"Which {topic}?", f"The {topic} is {value}.") for topic, value in chosen]
    turns[0] = Turn(f"Read: {' '.join(words)}. {turns[0].user}", turns[0].answer)
    return Conversation("recall", tuple(turns), thinking=rng.random() < 0.5)


def _tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (_tool("lookup", item="string", field="string"), _tool("order", item="string", count="integer"))


def _tool_use(rng: Random, split: Split, size: Size) -> Conversation:
    # Both tools in turn: a second number or value of one kind in the context would be an answer that is almost right.
    first = rng.randrange(2)
    subjects = ["order" if turn % 2 == first else rng.choice(LOOKUP_FIELDS) for turn in range(size.turns)]
    turns = tuple(_call(rng, split, subject) for subject in subjects)
    return Conversation("tool", turns, thinking=rng.random() < 0.5, tools=TOOLS)


def _call(rng: Random, split: Split, subject: str) -> Turn:
    item = _letters(rng, split)
    if subject == "order":
        count = int(rng.choice(TOPICS["number"]))
        return Turn(
            f"Order {count} of {item}", "It is done.", call=Call("order", {"item": item, "count": count}, "done")
        )
    value = rng.choice(TOPICS[subject])
    # Not the bare value: a word without a space before it is another token, which the answer could not copy.
    call = Call("lookup", {"item": item, "field": subject}, f"{subject}: {value}")
    return Turn(f"What is the {subject} of {item}?", f"The {subject} is {value}.", call=call)


KINDS: dict[str, Callable[[Random, Split, Size], Conversation]] = {
    "copy": _spelling("copy", "Repeat", str),
    "sort": _spelling("sort", "Sort", lambda word: "".join(sorted(word))),
    "think": _think,
    "recall": _recall,
    "tool": _tool_use,
}
