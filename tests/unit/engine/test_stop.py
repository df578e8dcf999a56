"""Stop strings are found wherever the text is cut, and no text that may belong to one escapes early."""

from itertools import pairwise

import pytest

from glm5.engine.frontend.outputs import Piece
from glm5.engine.frontend.stop import StopStrings

# text, stop strings, what is shown, what matched
CASES = [
    ("hello world", ["###"], "hello world", None),
    ("hello###world", ["###"], "hello", "###"),
    ("a##b###c", ["###"], "a##b", "###"),
    ("###", ["###"], "", "###"),
    ("####", ["###"], "", "###"),
    ("aab", ["ab"], "a", "ab"),
    ("ababac", ["abac"], "ab", "abac"),
    ("abc", ["abcd", "b"], "a", "b"),
    ("xab", ["b", "ab"], "x", "ab"),
    ("one\nQuestion: two", ["Question", "Assistant:", "<|separator|>"], "one\n", "Question"),
    ("so far Quest", ["Question"], "so far Quest", None),
    ("über ende", ["e ", "ende"], "über ", "ende"),
]


def run(chunks: list[str], stop: list[str], *, include: bool = False) -> tuple[str, str | None]:
    stream = StopStrings(stop, include=include)
    shown = ""
    for token_id, chunk in enumerate(chunks):
        shown += "".join(piece.text for piece in stream.feed(Piece(token_id, chunk)))
        certain = "".join(chunks[: token_id + 1])
        assert certain.startswith(shown)
        assert stream.matched or not any(tail(certain, s) > len(certain) - len(shown) for s in stop)
    return shown + "".join(piece.text for piece in stream.flush()), stream.matched


def tail(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def splits(text: str):
    """Every way to cut a short text; every pair of cuts and every even cut of a longer one."""
    if len(text) <= 9:
        for bits in range(1 << (len(text) - 1)):
            cuts = [0, *(i for i in range(1, len(text)) if bits >> (i - 1) & 1), len(text)]
            yield [text[a:b] for a, b in pairwise(cuts)]
        return
    for first in range(len(text)):
        for second in range(first, len(text)):
            yield [text[:first], text[first:second], text[second:]]
    for size in (1, 2, 3, 5, 7):
        yield [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize(("text", "stop", "shown", "matched"), CASES)
def test_the_same_at_every_chunking(text, stop, shown, matched):
    for chunks in splits(text):
        assert run(chunks, stop) == (shown, matched), chunks
        assert run(chunks, stop, include=True) == (shown + (matched or ""), matched), chunks


def test_random_text_of_two_letters_against_the_first_end(rng):
    for _ in range(500):
        text = "".join(rng.choices("ab", k=12))
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        ends = [(end, start) for s in stop for start in range(12) if text[start : (end := start + len(s))] == s]
        end, start = min(ends, default=(12, 12))
        cuts = sorted({0, 12, *rng.sample(range(12), 4)})
        chunks = [text[a:b] for a, b in pairwise(cuts)]
        assert run(chunks, stop) == (text[:start], text[start:end] or None)


def test_pieces_keep_their_tokens_and_a_cut_one_loses_it():
    stream = StopStrings(["STOP"])
    assert stream.feed(Piece(1, "a")) == [Piece(1, "a")]
    assert stream.feed(Piece(2, "bS")) == []
    assert stream.feed(Piece(3, "T")) == []
    assert stream.feed(Piece(4, "x")) == [Piece(2, "bS"), Piece(3, "T"), Piece(4, "x")]
    assert stream.feed(Piece(5, "yST")) == []
    assert stream.feed(Piece(6, "OPz")) == [Piece(None, "y")]
    assert stream.feed(Piece(7, "more")) == []
    assert stream.flush() == []


def test_text_let_through_unexamined_cannot_match():
    stream = StopStrings(["ab"])
    assert stream.pass_through(Piece(1, "ab")) == [Piece(1, "ab")]
    assert stream.feed(Piece(2, "a")) == []
    assert stream.pass_through(Piece(3, "b")) == [Piece(2, "a"), Piece(3, "b")]
    assert stream.matched is None
