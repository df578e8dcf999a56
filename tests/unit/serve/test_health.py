"""Whether the server serves, before, during and after: for probes, without a key."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from glm5.common.errors import RequestError
from glm5.serve.http.server import AppWhenReady, bind, serving
from glm5.serve.operations import health
from glm5.serve.service.state import ServerState
from tests.support.serving import ASK, CHAT, SECONDS, make_app, scripted, served


def error_of(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_before_there_is_a_model_everybody_is_told_so():
    state, engine = ServerState("it is being loaded"), scripted()
    front = AppWhenReady(state)
    with serving(front, engine, bind("127.0.0.1", 0)) as url, httpx.Client(base_url=url, timeout=SECONDS) as http:
        for path in ("/health", "/ready", "/", "/metrics", "/v1/models"):
            answer = http.get(path)
            assert error_of(answer) == (503, "starting")
            assert answer.headers["retry-after"]
        assert "it is being loaded" in http.post(CHAT, json=ASK).json()["error"]["message"]
        front.app = make_app(engine, state=state)
        state.not_serving = None
        assert [http.get(path).status_code for path in ("/health", "/ready", "/")] == [200, 200, 200]


def test_health_and_readiness_follow_engine_and_state():
    state, engine = ServerState(), scripted()
    with served(engine, state=state) as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        assert http.get("/health").content == b""
        assert http.head("/health").status_code == http.head("/ready").status_code == 200  # wget --spider asks so
        state.is_draining = True
        assert http.get("/health").status_code == 200
        assert error_of(http.get("/ready")) == (503, "draining")
        state.is_draining, state.is_main_silent = False, True
        for path in ("/health", "/ready", "/health_generate", "/v1/models"):
            assert error_of(http.get(path)) == (503, "main_process_silent")
        state.is_main_silent = False
        engine.stopped_because = "its process was killed"
        for path in ("/health", "/ready", "/health_generate"):
            answer = http.get(path)
            assert error_of(answer) == (503, "engine_stopped")
            assert "its process was killed" in answer.json()["error"]["message"]
        engine.stopped_because, state.not_serving = None, "it is started again"
        assert "it is started again" in http.get("/health").json()["error"]["message"]


def test_a_draining_server_ends_what_it_has_and_takes_nothing_more():
    state, engine = ServerState(), scripted("</think>to the end")
    engine.hangs = True
    with served(engine, state=state) as http, ThreadPoolExecutor(2) as pool:
        running = pool.submit(http.post, CHAT, json=ASK)
        assert engine.started.wait(SECONDS)
        state.is_draining = True
        refused = http.post(CHAT, json=ASK)
        assert error_of(refused) == (503, "draining")
        assert refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
        assert not state.wait_until_idle(0)
        engine.release()
        answer = running.result(SECONDS).json()
        assert answer["choices"][0]["message"]["content"] == "to the end"
        assert state.wait_until_idle(SECONDS)


def test_health_generate_asks_the_model_once_for_all_who_ask():
    engine, probe = scripted("a b"), health.Probe()
    engine.hangs = True

    async def main():
        requested = [asyncio.create_task(probe.run(engine)) for _ in range(3)]
        async with asyncio.timeout(SECONDS):
            while not engine.started.is_set():
                await asyncio.sleep(0)
            requested[0].cancel()  # who leaves does not end it for the others
            engine.release()
            results = await asyncio.gather(*requested, return_exceptions=True)
            await probe.run(engine)
        return results

    results = asyncio.run(main())
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [None, None]
    assert engine.num_submitted == 2


@pytest.mark.parametrize(
    ("error", "code"), [(RequestError("no token is possible"), "engine_stopped"), (None, "engine_slow")]
)
def test_health_generate_when_no_token_comes(error, code):
    engine = scripted("abc")
    engine.hangs, engine.fails = error is None, error
    app = make_app(engine)
    app.state.probe.seconds = 0.1 if error is None else SECONDS
    with serving(app, engine, bind("127.0.0.1", 0)) as url, httpx.Client(base_url=url, timeout=SECONDS) as http:
        assert error_of(http.get("/health_generate")) == (503, code)
        engine.release()
        engine.fails = None
        assert http.get("/health_generate").status_code == 200


def test_warming_up_asks_for_no_more_than_fits():
    engine = scripted("abcdef")
    health.warm_up(engine)
    assert engine.params.max_tokens == health.WARM_UP_TOKENS
    engine.max_model_len = 2
    health.warm_up(engine)
    assert engine.params.max_tokens == 1
    engine.params, engine.max_model_len = None, 1
    health.warm_up(engine)
    assert engine.params is None
