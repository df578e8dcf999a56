"""The times of one request, against values computed by hand."""

import pytest

from glm5.bench.serve.api_formats import Piece, Usage
from glm5.bench.serve.failure import CUT_OFF, NO_TOKENS, RequestFailed
from glm5.bench.serve.record import Record, distribute

EXACT = pytest.approx


def settled(pieces, sent=10.0):
    record = Record(sent=sent)
    for at, piece in pieces:
        record.add(piece, at)
    record.finalize()
    return record


def token(**more):
    return Piece("x", carries=True, **more)


END, ROLE = Piece(finish="stop"), Piece()


def usage(n, prompt=5):
    return Piece(usage=Usage(prompt, n))


def test_a_token_a_chunk():
    # A role is no token, the last token comes with the reason, usage after it is no part of the latency.
    last = token(finish="length")
    record = settled([(11.0, ROLE), (12.0, token()), (12.5, token()), (14.0, last), (99.0, usage(3))])
    assert record.ttft == EXACT(2.0)
    assert record.latency == EXACT(4.0)
    assert record.tpot == EXACT((4.0 - 2.0) / 2)
    assert record.itl() == EXACT([0.5, 1.5])
    assert record.gaps() == record.itl()
    assert (record.num_tokens, record.counted, record.finish) == (3, "chunk", "length")


def test_a_chunk_with_only_the_reason_is_no_token():
    record = settled([(12.0, token()), (13.0, token()), (13.5, END), (13.5, usage(2))])
    assert record.itl() == EXACT([1.0])
    assert record.latency == EXACT(3.5)  # but the answer ends with it
    assert record.tpot == EXACT(1.5)


def test_unless_usage_says_that_a_token_was_in_it():
    record = settled([(12.0, token()), (13.0, token()), (13.5, END), (13.5, usage(3))])
    assert record.itl() == EXACT([1.0, 0.5])
    assert record.tpot == EXACT(1.5 / 2)


def test_several_tokens_a_chunk_that_says_how_many():
    pieces = [(12.0, token(added=2)), (13.0, token(added=3)), (15.0, token(added=1, finish="stop")), (15.0, usage(6))]
    record = settled(pieces)
    assert list(record.tokens) == [2, 3, 1]
    assert record.itl() == EXACT([1 / 3] * 3 + [2.0])
    assert record.gaps() == EXACT([1.0, 2.0])
    assert record.tpot == EXACT(3.0 / 5)
    assert record.counted == "chunk"


def test_totals_in_every_chunk():
    def at(n):
        return Usage(5, n)

    pieces = [
        (11.0, Piece(total=0, usage=at(0))),
        (12.0, token(total=1, usage=at(1))),
        (13.0, token(total=4, usage=at(4))),
        (13.5, token(total=4, usage=at(4))),  # one token in two chunks
        (14.0, token(total=5, usage=at(5))),
        (14.5, Piece(total=6, usage=at(6), finish="stop")),  # the token that ended the answer has no text
    ]
    record = settled(pieces)
    assert list(record.tokens) == [1, 3, 0, 1, 1]
    assert record.itl() == EXACT([1 / 3] * 3 + [1.0, 0.5])
    assert record.num_tokens == 6


def test_a_reason_without_a_token_of_its_own():
    pieces = [(12.0, token(total=2)), (13.0, token(total=3)), (13.5, Piece(total=3, finish="stop")), (14, usage(3))]
    record = settled(pieces)
    assert list(record.tokens) == [2, 1]


def test_usage_alone_is_spread():
    pieces = [(12.0, token()), (13.0, token()), (14.0, token()), (14.0, END), (14.0, usage(8))]
    record = settled(pieces)
    assert list(record.tokens) == [3, 2, 3]
    assert record.itl() == EXACT([0.5] * 2 + [1 / 3] * 3)
    assert record.tpot == EXACT(2.0 / 7)
    assert record.counted == "usage"


def test_usage_with_the_last_chunk_only():
    pieces = [(12.0, token()), (13.0, token()), (13.5, Piece(finish="stop", total=2, usage=Usage(5, 2)))]
    record = settled(pieces)
    assert (list(record.tokens), record.counted) == ([1, 1], "chunk")


def test_more_chunks_than_tokens():
    pieces = [(at, token()) for at in (12.0, 13.0, 14.0, 15.0, 16.0)]
    record = settled([*pieces, (16.0, END), (16.0, usage(3))])
    assert list(record.tokens) == [1, 0, 1, 0, 1]
    assert record.itl() == EXACT([2.0, 2.0])


def test_without_usage_a_chunk_is_taken_for_a_token():
    record = settled([(12.0, token()), (13.0, token(finish="stop"))])
    assert (record.num_tokens, record.counted) == (2, "guess")


def test_one_token_has_no_tpot():
    record = settled([(12.0, token(finish="stop")), (12.0, usage(1))])
    assert record.tpot is None
    assert record.itl() == []


@pytest.mark.parametrize(
    ("said", "num_tokens", "counted"),
    [([usage(1)], 1, "chunk"), ([usage(3)], 3, "chunk"), ([usage(0)], 0, "chunk"), ([], 1, "guess")],
)
def test_an_answer_without_text_is_an_answer(said, num_tokens, counted):
    record = settled([(11.0, ROLE), (12.0, END), *((13.0, piece) for piece in said)])
    assert (record.num_tokens, record.counted, record.finish) == (num_tokens, counted, "stop")
    assert (record.ttft, record.latency) == (EXACT(2.0), EXACT(2.0))
    assert (list(record.tokens), record.itl()) == ([num_tokens], [])


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([], NO_TOKENS),
        ([(11.0, ROLE), (12.0, usage(0))], NO_TOKENS),
        ([(11.0, token()), (12.0, usage(1))], CUT_OFF),
    ],
)
def test_what_is_no_whole_answer(pieces, kind):
    with pytest.raises(RequestFailed) as caught:
        settled(pieces)
    assert caught.value.kind == kind


def test_distribute_keeps_the_sum_and_is_even(rng):
    for _ in range(300):
        total, num_chunks = rng.randint(1, 200), rng.randint(1, 60)
        tokens = distribute(total, num_chunks)
        assert (sum(tokens), len(tokens)) == (total, num_chunks)
        assert tokens[0] >= 1
        assert max(tokens[1:], default=1) - min(tokens[1:], default=1) <= 1
