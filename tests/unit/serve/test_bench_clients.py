"""What two load generators send and how they read the answer: `vllm bench serve` and `sglang.bench_serving`, both
of their OpenAI backends each. Their reading is replayed here as they do it: line by line, or event by event."""

import json
import threading

import httpx
import pytest

from glm5.serve.http import sse
from tests.support.tokenizers import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
LENGTH = 12
PROMPT_IDS = TOKENIZER.encode("the answer is: Berlin and the rest")


@pytest.fixture(scope="module")
def url(model_server):
    return model_server[0]


def vllm_events(raw: bytes):
    """JSON of the events, which are parted by blank lines; comments are passed over."""
    for message in raw.decode().split("\n\n"):
        message = message.strip()
        if message and not message.startswith(":"):
            data = message.removeprefix("data: ")
            if data != "[DONE]":
                yield json.loads(data)


def sglang_events(raw: bytes):
    """JSON of every line that is not empty."""
    for line in raw.splitlines():
        if line := line.strip():
            data = line.decode().removeprefix("data: ")
            if data != "[DONE]":
                yield json.loads(data)


def read_by_vllm(raw: bytes, piece_of):
    """Output text, events with a token, usage."""
    text, num_tokens, usage = "", 0, None
    for data in vllm_events(raw):
        if choices := data.get("choices"):
            num_tokens += 1
            text += piece_of(choices[0]) or ""
        elif data.get("usage"):
            usage = data["usage"]
    return text, num_tokens, usage


def post(url, path, body):
    answer = httpx.post(url + path, json=body, timeout=60, headers={"x-request-id": "bench-1"})
    assert answer.status_code == 200, answer.text
    assert answer.content.endswith(b"data: [DONE]\n\n")
    return answer.content


@pytest.mark.parametrize("prompt", [PROMPT_IDS, TOKENIZER.decode(PROMPT_IDS)], ids=["ids", "text"])
def test_vllm_openai(url, prompt):
    body = {
        "model": "tiny", "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": LENGTH, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0,
        "top_p": None, "an_unknown_field": 1,
    }  # fmt: skip
    _, num_tokens, usage = read_by_vllm(post(url, "/v1/completions", body), lambda choice: choice.get("text"))
    assert 0 < num_tokens <= LENGTH
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT_IDS), LENGTH)


def test_vllm_openai_chat(url):
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "the answer"}]}],
        "max_completion_tokens": LENGTH, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    raw = post(url, "/v1/chat/completions", body)
    text, num_tokens, usage = read_by_vllm(raw, lambda choice: choice["delta"].get("content"))
    assert 0 < num_tokens <= LENGTH
    assert text
    assert usage["completion_tokens"] == LENGTH
    first = next(vllm_events(raw))["choices"][0]["delta"]
    assert first.get("content") or first.get("reasoning_content"), "the first event is the first token"


def test_sglang_oai(url):
    """It indexes choices[0] of every event, and takes the length that it asked for where no usage is told."""
    body = {
        "model": "tiny", "prompt": TOKENIZER.decode(PROMPT_IDS), "temperature": 0.0, "best_of": 1, "max_tokens": LENGTH,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip
    text, length = "", LENGTH
    for data in sglang_events(post(url, "/v1/completions", body)):
        if data["choices"][0]["text"]:
            text += data["choices"][0]["text"]
            length = (data.get("usage") or {}).get("completion_tokens", length)
    assert text
    assert length == LENGTH


@pytest.mark.parametrize("asks_usage", [False, True])
def test_sglang_oai_chat(url, asks_usage):
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "the answer"}], "max_completion_tokens": LENGTH,
        "stream": True, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    body |= {"stream_options": {"include_usage": True}} if asks_usage else {}
    text, length = "", None
    for data in sglang_events(post(url, "/v1/chat/completions", body)):
        length = (data.get("usage") or {}).get("completion_tokens", length)
        if not (choices := data.get("choices") or []):
            assert asks_usage
            continue
        delta = choices[0].get("delta") or {}
        text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
    assert text
    assert length == (LENGTH if asks_usage else None)


def test_sglang_without_streams(url):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": LENGTH,
            "stream": False, "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == LENGTH


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_both_read_what_keeps_a_stream_alive(scripted_server, engine, monkeypatch, path):
    """Comments for those that know them, empty lines for those that do not; nothing of it is an event."""
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    engine.script, engine.hangs = "abc", True
    body = {"stream": True} | (
        {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    )
    for agent, ping in (("Python/3.12 aiohttp/3.12", b"\n"), ("AsyncOpenAI/Python 2.0", b": ping\n\n")):
        engine.left = threading.Event()
        headers, raw = {"user-agent": agent}, b""
        with httpx.stream("POST", scripted_server[0] + path, json=body, headers=headers, timeout=20) as answer:
            for piece in answer.iter_raw():
                raw += piece
                if raw.endswith(ping * 2):
                    break
        assert engine.left.wait(20)
        read = sglang_events if ping == b"\n" else vllm_events
        assert len(list(read(raw))) == 1


def test_the_model_is_found_by_name(url):
    card = httpx.get(url + "/v1/models").json()["data"][0]
    assert (card["id"], card["root"]) == ("tiny", "org/tiny")
