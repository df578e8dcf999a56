"""Chunks of which only a text is serialized anew are the chunks that are serialized as a whole."""

import socket
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from glm5.chat.events import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from glm5.engine.frontend.outputs import Delta, Piece
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.chat.answer import ChatAnswer
from glm5.serve.chat.body import ChatBody
from glm5.serve.completions.answer import CompletionAnswer, PromptInput
from glm5.serve.completions.body import CompletionBody
from glm5.serve.generation.job import Job, Reader, Step, Usage, _DeltaReader, _send_now
from glm5.serve.generation.logprobs import TokenTexts
from glm5.serve.http.sse import Tap, event
from tests.support.tokenizers import tiny_tokenizer

TEXTS = ["a", " the", '"', "\\", "\n", "é", "日", "😀", "\ufffd", "\ud800", "", "\0", "</script>", "x" * 50]
SPELLER = TokenTexts(tiny_tokenizer())


def make_steps(rng, num_answers, *, chat):
    kinds = (ContentDelta, ReasoningDelta) if chat else (ContentDelta,)
    for number in range(40):
        events = [rng.choice(kinds)(rng.choice(TEXTS)) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
        if chat and rng.random() < 0.1:
            events += [ToolCallStart(0, "call_1", "f"), ToolCallArguments(0, "{}"), ToolCallEnd(0)]
        index = rng.randrange(num_answers)
        reason = rng.choice(["stop", "length"]) if number > 30 and rng.random() < 0.2 else None
        yield Step(index, events, tuple(rng.choices(range(300), k=rng.choice([0, 1, 1, 3]))), finish_reason=reason)


def written(chunk) -> str:
    return "" if chunk is None else event(chunk)


OPTIONS = [
    {},
    {"n": 2},
    {"return_token_ids": True},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


@pytest.mark.parametrize("options", [*OPTIONS, {"include_reasoning": False}])
def test_chat(options, rng):
    body = ChatBody.model_validate({"messages": [], "stream": True, **options})
    for _ in range(20):
        short, long = (ChatAnswer(body, "id", 'a "model"', [1, 2], SPELLER) for _ in range(2))
        long.head = short.head
        usage = Usage(3)
        for step in make_steps(rng, body.n, chat=True):
            usage.completion_tokens += len(step.token_ids)
            assert short.event(step, usage) == written(long.chunk(step, usage))


@pytest.mark.parametrize("options", [*OPTIONS, {"echo": True}, {"max_tokens": 0, "echo": True}])
def test_completions(options, rng):
    body = CompletionBody.model_validate({"prompt": ["a", "b"], "stream": True, **options})
    for _ in range(20):
        prompts = [PromptInput("a", [1]), PromptInput(None, [2, 3])]
        short, long = (CompletionAnswer(body, "id", "model", prompts, SPELLER) for _ in range(2))
        long.head = short.head
        usage = Usage(3)
        for step in make_steps(rng, body.n, chat=False):
            number = rng.randrange(2)
            usage.completion_tokens += len(step.token_ids)
            counted = usage if body.repeats_usage else None
            assert short.event(number, step, counted) == written(long.chunk(number, step, counted))


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_sent_past_the_stream_s_task_is_the_chunk_of_the_step(options, rng, monkeypatch):
    """Deltas with reasoning, text, tags, and pieces without text, of one or several tokens."""
    monkeypatch.setattr("glm5.chat.parser.uuid.uuid4", lambda: SimpleNamespace(hex="id"))
    tokenizer, body = tiny_tokenizer(), ChatBody.model_validate({"messages": [], "stream": True, **options})
    names = [tokenizer.id_of(tag) for tag in ("</think>", "<tool_call>", "</tool_call>")]
    job = Job("id", [1], SamplingParams(), reader=Reader(tokenizer, reasoning=True, parse_tools=True))
    sent, are_plain = [], set()
    for _ in range(20):
        answers = [ChatAnswer(body, "id", "model", [1, 2], SPELLER) for _ in range(2)]
        answers[1].head = answers[0].head
        usages = [Usage(3), Usage(3)]
        reader, other_reader = (_DeltaReader(job, usage) for usage in usages)
        tap = Tap(partial(answers[0].event, usage=usages[0]), answers[0].plain_events)
        tap.out = SimpleNamespace(is_open=True, write_now=sent.append)
        for _ in range(60):
            pieces = [Piece(None, rng.choice(TEXTS)) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
            if rng.random() < 0.1:
                name = rng.choice(names)
                pieces.append(Piece(name, tokenizer.decode([name])))
            delta = Delta((1,) * max(1, len(pieces)), tuple(pieces), index=rng.randrange(body.n))
            sent.clear()
            assert _send_now(tap, reader, delta)
            step = other_reader.step(delta, other_reader.events(delta))
            assert b"".join(sent).decode() == written(answers[1].chunk(step, usages[1]))
            assert usages[0] == usages[1]
        are_plain.add(bool(answers[0].plain_events))
    assert (True in are_plain) == ("return_token_ids" not in options and not body.repeats_usage)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_body_written_past_asgi_is_http(model_server, version):
    """Chunks for HTTP/1.1; for HTTP/1.0, which has none, the events as they are."""
    url = urlsplit(model_server[0])
    body = b'{"prompt": "hi", "max_tokens": 20, "ignore_eos": true, "stream": true}'
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    _, _, rest = answer.partition(b"\r\n\r\n")
    if version == "1.1":
        parts, rest = [], rest
        while (size := int(rest[: rest.index(b"\r\n")], 16)) > 0:
            start = rest.index(b"\r\n") + 2
            parts.append(rest[start : start + size])
            assert rest[start + size : start + size + 2] == b"\r\n"
            rest = rest[start + size + 2 :]
        assert rest == b"0\r\n\r\n"
        rest = b"".join(parts)
    events = rest.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(one.startswith("data: {") for one in events[:-2])
    assert len(events) > 3
