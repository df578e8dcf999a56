"""Deltas that are diverted or awaited: none is lost, none overtakes another, and first tokens come first."""

import asyncio

import pytest

from glm5.engine.async_engine import Deltas, _Dispatch
from glm5.engine.frontend.output_stream import NEVER, OutputStream
from glm5.engine.frontend.text import AnswerText
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import Update

SECONDS = 20
PARAMS = SamplingParams()


def new_stream() -> OutputStream:
    return OutputStream(0, PARAMS, AnswerText(None, PARAMS), str, sent=0.0)


def grow(stream, token_id, put, reason=None) -> None:
    """As the client does."""
    if reason is None:
        stream.add_token(token_id, 0, 1.0)
    else:
        stream.add(Update(0, [token_id], 0, reason), 1.0)
    if reason is not None or len(stream.news) >= stream.threshold:
        stream.threshold = NEVER
        put(stream)


def run(main):
    return asyncio.run(asyncio.wait_for(main(), SECONDS))


def test_every_delta_takes_one_of_two_ways_in_order(rng):
    async def main():
        deltas, stream, seen, ways = Deltas(1), new_stream(), [], set()

        def divert(delta):
            if delta.finish_reason is not None or rng.random() < 0.3:
                return False
            seen.extend(delta.token_ids)
            ways.add("diverted")
            return True

        async def read():
            async for delta in deltas:
                seen.extend(delta.token_ids)
                ways.add("awaited")
                for _ in range(rng.randint(0, 3)):  # a client that does not read at once
                    await asyncio.sleep(0)

        deltas.divert = divert
        reading = asyncio.ensure_future(read())
        for token_id in range(300):
            grow(stream, token_id, deltas.put, "length" if token_id == 299 else None)
            if rng.random() < 0.7:
                await asyncio.sleep(0)
        await reading
        assert seen == list(range(300))
        assert ways == {"diverted", "awaited"}

    run(main)


def test_an_error_in_it_is_raised_where_deltas_are_awaited():
    async def main():
        deltas, stream = Deltas(1), new_stream()

        def divert(_):
            raise KeyError("bug")

        deltas.divert = divert
        reading = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        grow(stream, 1, deltas.put)
        with pytest.raises(KeyError, match="bug"):
            await reading

    run(main)


def test_first_tokens_are_passed_on_before_others():
    """They wait for none of those that arrived before them and are not passed on yet."""

    async def main():
        order = []

        class Noting(Deltas):
            def put(self, item):
                order.append(names[item])
                item.take()

        streams = [new_stream() for _ in range(100)]
        names = {stream: f"old {number}" for number, stream in enumerate(streams)}
        for stream in streams:
            stream.add_token(1, 0, 1.0)
            stream.take()
            stream.add_token(2, 0, 2.0)
        first = new_stream()
        first.add_token(1, 0, 3.0)
        names[first] = "first"
        dispatch = _Dispatch(asyncio.get_running_loop())
        dispatch.add([(Noting(1), None, stream) for stream in streams])
        before = len(order)
        assert 0 < before < 100
        dispatch.add([(Noting(1), None, first)])
        assert order[before] == "first"
        while len(order) < 101:
            await asyncio.sleep(0)
        assert [name for name in order if name != "first"] == [names[stream] for stream in streams]

    run(main)
