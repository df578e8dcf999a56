"""A real engine behind a real socket: the answers are the engine's, and the end is clean."""

import asyncio
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import openai
import pytest
from starlette.responses import JSONResponse

from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.http.server import Server, bind, is_everywhere, url_of
from tests.support.models import random_model
from tests.support.tokenizers import tiny_tokenizer
from tests.unit.serve.conftest import run_app

ASK = [{"role": "user", "content": "the answer is"}]


def text_of(message) -> str:
    return (message.reasoning_content or "") + (message.content or "")


def test_the_answer_is_the_engines(model_server):
    url, _ = model_server
    tokenizer = tiny_tokenizer()
    prompt = tokenizer.encode("[gMASK]<sop><|user|>the answer is<|assistant|><think>")
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True, skip_special_tokens=False)
    with LLM(random_model(11), tokenizer, max_model_len=256) as llm:
        want = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    options = {"temperature": 0.8, "seed": 5, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        assert client.models.list().data[0].id == "tiny"
        answer = client.chat.completions.create(model="tiny", messages=ASK, **options)
        chunks = list(client.chat.completions.create(model="tiny", messages=ASK, stream=True, **options))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    whole = text_of(answer.choices[0].message)
    # Only think tags may be missing from the text.
    assert whole == want.text.replace("<think>", "", 1).replace("</think>", "")
    pieces = [delta for chunk in chunks for delta in [chunk.choices[0].delta.model_dump()]]
    assert "".join((d.get("reasoning_content") or "") + (d.get("content") or "") for d in pieces) == whole


def test_a_stop_string_over_http(model_server):
    with openai.OpenAI(base_url=model_server[0] + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        ask = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
        free = text_of(client.chat.completions.create(**ask).choices[0].message)
        stop = free[8:11]
        answer = client.chat.completions.create(**ask, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert text_of(answer.message) == free[: free.index(stop)]


def test_requests_at_the_same_time(model_server):
    url, answers = model_server[0], {}

    def ask(seed):
        body = {"messages": ASK, "seed": seed, "max_tokens": 12, "ignore_eos": True}
        answers.setdefault(seed, []).append(
            httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]
        )

    for _ in range(2):
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(first == second for first, second in answers.values())
    assert len({str(pair) for pair in answers.values()}) == 6


def test_ending_the_server_ends_running_answers():
    engine = AsyncEngine(LLM(random_model(11), tiny_tokenizer(), max_model_len=1024))
    body = {"messages": ASK, "stream": True, "ignore_eos": True}
    with engine, httpx.Client(timeout=30) as client:
        server = run_app(engine)
        url = server.__enter__()
        assert client.get(url + "/health").status_code == 200
        with client.stream("POST", url + "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            ending = threading.Thread(target=server.__exit__, args=(None, None, None))
            ending.start()
            rest = [line for line in lines if line]
            ending.join()
        assert "the server is closing" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError):
            client.get(url + "/health")
    assert not engine.is_ready


def test_health_follows_the_engine():
    engine = AsyncEngine(LLM(random_model(11), tiny_tokenizer(), max_model_len=128))
    with run_app(engine) as url, httpx.Client(base_url=url, timeout=30) as client:
        assert client.get("/health").status_code == 503
        engine.start()
        assert client.get("/health").status_code == 200
        engine.llm.client.link.core.step = lambda: 1 / 0
        answer = client.post("/v1/chat/completions", json={"messages": ASK})
        assert answer.status_code == 503
        assert "ZeroDivisionError" in answer.json()["error"]["message"]
        assert "ZeroDivisionError" in client.get("/health").json()["error"]["message"]


def test_who_has_connected_when_it_stops_listening_is_answered():
    """Connections of every kind: accepted, accepted and not set up, and queued in the kernel."""
    may_go_on = threading.Event()
    with bind("127.0.0.1", 0) as listener, ExitStack() as stack:
        address = listener.getsockname()
        server = Server(JSONResponse({"a": 1}), listener)
        server.start()
        server._server.loop.call_soon_threadsafe(may_go_on.wait)
        clients = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(30)]
        for client in clients:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(server.stop_listening)
            may_go_on.set()
            stopping.result(60)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        assert all(client.recv(99).startswith(b"HTTP/1.1 200") for client in clients)
        server.stop_listening()  # nothing is left to do
        server.stop()
        server.stop_listening()


def test_answers_do_not_wait_for_acknowledgements():
    """Where the kernel gathers what is sent, the second part of an answer comes 40 ms after the first."""

    async def main():
        connected = asyncio.get_running_loop().create_future()

        def note(_, writer):
            connected.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(note, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                has_no_delay = await asyncio.wait_for(connected, 20)
                writer.close()
        return has_no_delay

    assert asyncio.run(main())


def test_an_address_that_cannot_be_had():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}: .*; choose another --port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    "host", ["256.1.1.1", "no such host", "a..b", "a" * 70, "a\0b", "ä" * 70, "http://127.0.0.1", "192.0.2.1", "[::1]"]
)
def test_a_host_that_is_none(host):
    with pytest.raises(OSError, match=f"^cannot listen on {re.escape(host)} port 0: [^\n]+$"):
        bind(host, 0)


def test_ipv6():
    try:
        listener = bind("::1", 0)
    except OSError as error:
        pytest.skip(str(error))
    engine = AsyncEngine(LLM(random_model(11), tiny_tokenizer(), max_model_len=128))
    with run_app(engine, listener) as url, httpx.Client(base_url=url, timeout=30) as client:
        assert url.startswith("http://[::1]:")
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (("127.0.0.1", 80), "http://127.0.0.1:80"),
        (("0.0.0.0", 8000), "http://127.0.0.1:8000"),
        (("::", 8000, 0, 0), "http://[::1]:8000"),
        (("2001:db8::1", 8000, 0, 0), "http://[2001:db8::1]:8000"),
        (("fe80::1%eth0", 8000, 0, 2), "http://[fe80::1%25eth0]:8000"),
    ],
)
def test_urls(name, url):
    listener = SimpleNamespace(getsockname=lambda: name)
    assert url_of(listener) == url
    assert is_everywhere(listener) == (name[0] in ("0.0.0.0", "::"))


@pytest.mark.parametrize("seconds", [0.0001, 60, 2_147_483])
def test_every_client_timeout_is_one_for_the_kernel(seconds):
    bind("127.0.0.1", 0, client_timeout=seconds).close()
