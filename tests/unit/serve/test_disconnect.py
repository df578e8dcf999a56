"""A client that leaves aborts its request: while it waits, while it streams, and when it asked for one piece."""

import asyncio
import queue

import httpx
import pytest

from glm5.engine.transport.wire import AbortRequests
from glm5.serve.http.disconnect import CancelOnDisconnect
from glm5.serve.http.server import bind, serving
from tests.support.serving import make_app, scripted

ASK = [{"role": "user", "content": "hi"}]
SECONDS = 20  # an upper limit for what takes milliseconds; passing never waits for it


ROUTES = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": ASK, "max_tokens": 9},
    "/generate": {"text": "hi"},
    "/inference/v1/generate": {"token_ids": [1, 2]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_leaving_a_scripted_answer_aborts(scripted_server, engine, path, stream):
    engine.script, engine.hangs = "abc", True

    async def main():
        async with httpx.AsyncClient(base_url=scripted_server[0], timeout=SECONDS) as client:
            task = asyncio.create_task(client.post(path, json=ROUTES[path] | {"stream": stream}))
            assert await asyncio.to_thread(engine.started.wait, SECONDS)
            assert not engine.left.is_set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await asyncio.to_thread(engine.left.wait, SECONDS)

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_is_logged_and_counted_by_how_it_ended(leaves, caplog):
    """Its status line says 200 either way."""
    path, body = "/v1/chat/completions", {"messages": ASK, "stream": True}
    engine = scripted("abc")
    engine.hangs = leaves
    app = make_app(engine)
    with caplog.at_level("INFO", "glm5.serve"), serving(app, engine, bind("127.0.0.1", 0)) as url:
        with httpx.Client(base_url=url, timeout=SECONDS) as client, client.stream("POST", path, json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            if not leaves:
                assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert engine.left.wait(SECONDS)
    ends = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"POST {path}")]
    kinds = {kind: app.state.service.metrics.http.value("POST", path, kind) for kind in ("2xx", "left")}
    if leaves:
        assert any(end.startswith(f"POST {path} left ") for end in ends), ends
        assert not any(end.startswith(f"POST {path} 200 ") for end in ends), ends
        assert kinds == {"2xx": 0, "left": 1}
    else:
        assert [end.split()[2] for end in ends] == ["200"]
        assert kinds == {"2xx": 1, "left": 0}


def test_leaving_a_real_answer_aborts(model_server, monkeypatch):
    """An answer that would fill the context ends soon after its client has left."""
    url, engine = model_server
    aborted, core = queue.Queue(), engine.llm.client.link.core
    receive, replies = core.receive, core._replies

    def watch(message):
        if isinstance(message, AbortRequests):
            aborted.put(sum(replies[seq_id].num_tokens for seq_id in message.seq_ids))
        receive(message)

    monkeypatch.setattr(core, "receive", watch)
    body = {"messages": ASK, "stream": True, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        for _ in range(3):
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
            assert aborted.get(timeout=SECONDS) < engine.max_model_len - 100


def test_an_answer_that_is_complete_is_not_cancelled():
    """Servers report a disconnect after every answer; what the handler does after its answer must still happen."""
    done = []

    async def app(scope, receive, send):
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": False})
        for _ in range(5):
            await asyncio.sleep(0)
        done.append("cleaned up")

    async def main():
        messages = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
        answered = asyncio.Event()

        async def receive():
            if len(messages) == 1:
                await answered.wait()
            return messages.pop(0)

        async def send(message):
            if message["type"] == "http.response.body":
                answered.set()

        await CancelOnDisconnect(app)({"type": "http", "method": "GET", "path": "/"}, receive, send)

    asyncio.run(main())
    assert done == ["cleaned up"]


def test_an_error_of_the_application_comes_through():
    async def app(scope, receive, send):
        raise KeyError("bug")

    async def receive():
        await asyncio.Event().wait()

    with pytest.raises(KeyError):
        asyncio.run(CancelOnDisconnect(app)({"type": "http", "method": "GET", "path": "/"}, receive, None))
