"""Streams: an error before the first event is an answer of its own, what is left is closed, silence is filled."""

import asyncio

import pytest

from glm5.serve.generation.job import Step, merged
from glm5.serve.http import sse
from glm5.serve.http.errors import ApiError
from glm5.serve.http.sse import COMMENT, EMPTY_LINE, EventStream, keep_alive_for

SECONDS = 20


class Source:
    """Events, or errors to raise, one after the other; None waits for ever. `is_closed` once nobody reads any more."""

    def __init__(self, *items):
        self.items, self.is_closed, self.is_waiting = items, False, asyncio.Event()

    async def __aiter__(self):
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    self.is_waiting.set()
                    await asyncio.Event().wait()
                yield item
        finally:
            self.is_closed = True


def failed(error):
    return f"failed: {error.message}"


async def sent_by(stream, agent=b"", until=None):
    """What a stream sends; cancelled once `until` was sent."""
    sent, done = [], asyncio.Event()

    async def send(message):
        sent.append(message.get("body", b"").decode())
        if until is not None and sent[-1] == until:
            done.set()

    task = asyncio.ensure_future(stream({"type": "http", "headers": [(b"user-agent", agent)]}, None, send))
    if until is not None:
        await asyncio.wait_for(done.wait(), SECONDS)
        task.cancel()
    await asyncio.wait({task}, timeout=SECONDS)
    assert task.done()
    return sent[1:]  # but the status line


def run(main):
    return asyncio.run(asyncio.wait_for(main, SECONDS))


def test_events_and_their_end():
    async def main():
        source = Source("a", "b")
        stream = await EventStream.begun(aiter(source), failed=failed)
        assert await sent_by(stream) == ["a", "b", ""]
        assert source.is_closed
        assert await sent_by(await EventStream.begun(aiter(Source()), failed=failed)) == [""]

    run(main())


def test_an_error_before_the_first_event_is_an_exception():
    async def main():
        source = Source(ApiError(400, "no"))
        with pytest.raises(ApiError, match="no"):
            await EventStream.begun(aiter(source), failed=failed)
        assert source.is_closed

    run(main())


def test_an_error_after_it_is_the_last_event():
    async def main():
        stream = await EventStream.begun(aiter(Source("a", ApiError(503, "gone"))), failed=failed)
        assert await sent_by(stream) == ["a", "failed: gone", ""]
        stream = await EventStream.begun(aiter(Source("a", ValueError("secret"))), failed=failed)
        assert await sent_by(stream) == ["a", "failed: internal error; the server's log has the details", ""]

    run(main())


def test_a_late_first_event_lets_the_status_go_first(monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)

    async def main():
        source = Source(None)
        stream = await EventStream.begun(aiter(source), failed=failed)
        assert source.is_waiting.is_set()
        sent = await sent_by(stream, until=COMMENT)
        assert set(sent) == {COMMENT}
        assert source.is_closed

    run(main())


def test_leaving_before_the_first_event_closes_the_source():
    async def main():
        source = Source(None)
        task = asyncio.ensure_future(EventStream.begun(aiter(source), failed=failed))
        await source.is_waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.is_closed

    run(main())


def test_leaving_between_events_closes_the_source(monkeypatch):
    async def main():
        source = Source("a", None)
        stream = await EventStream.begun(aiter(source), failed=failed)
        assert await sent_by(stream, until="a") == ["a"]
        assert source.is_closed

    run(main())


def test_a_ping_of_ones_own(monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)

    async def main():
        stream = await EventStream.begun(aiter(Source("a", None)), failed=failed, ping="event: ping\n\n")
        assert set(await sent_by(stream, agent=b"aiohttp", until="event: ping\n\n")) == {"a", "event: ping\n\n"}

    run(main())


def test_what_keeps_whom_alive():
    assert keep_alive_for("Python/3.11 aiohttp/3.9") == keep_alive_for("python-requests/2.31") == EMPTY_LINE
    assert keep_alive_for("OpenAI/Python 3.5") == keep_alive_for("Mozilla/5.0") == keep_alive_for("") == COMMENT


def test_merged_steps_and_what_ends_them_all():
    def step(token_id):
        return Step(0, (), (token_id,))

    async def main():
        sources = [Source(step(1), step(2)), Source(), Source(step(3))]
        found = [(number, part.token_ids[0]) async for number, part in merged([aiter(source) for source in sources])]
        assert sorted(found) == [(0, 1), (0, 2), (2, 3)]
        sources = [Source(step(1), None), Source(step(2), ApiError(400, "no"))]
        with pytest.raises(ApiError, match="no"):
            async for _ in merged([aiter(source) for source in sources]):
                pass
        assert all(source.is_closed for source in sources)
        sources = [Source(step(1), None), Source(None)]
        parts = merged([aiter(source) for source in sources])
        await anext(parts)
        await parts.aclose()
        assert all(source.is_closed for source in sources)

    run(main())
