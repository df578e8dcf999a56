"""Events come out whole, however the bytes are divided."""

import pytest

from glm5.bench.serve.sse import Events

STREAM = (
    b": ping\n\ndata: one\n\nevent: x\nid: 3\ndata:two\n\r\n"
    b"data: three\r\n\r\n: ping\ndata: 4a\ndata: 4b\n\n\n\ndata: end"
)
EVENTS = [b"one", b"two", b"three", b"4a\n4b"]


def split(pieces):
    events = Events()
    return [data for piece in pieces for data in events.feed(piece)], list(events.finish())


def test_every_division_gives_the_same_events():
    divisions = [[STREAM], [STREAM[k : k + 1] for k in range(len(STREAM))]]
    divisions += [[STREAM[:k], STREAM[k:]] for k in range(1, len(STREAM))]
    divisions += [[line + b"\n" for line in STREAM.split(b"\n")]]
    for pieces in divisions:
        assert split(pieces) == (EVENTS, [b"end"])


@pytest.mark.parametrize("piece", [b"data: x\n\n", b"data: x\n", b"data:x\r\n\r\n", b"retry: 3\ndata: x\n\n"])
def test_whole_pieces(piece):
    done, rest = split([piece])
    assert done + rest == [b"x"]


def test_nothing_from_keep_alives():
    assert split([b":\n\n", b": ping\n\n", b"\n\n", b"event: ping\n\n"]) == ([], [])
