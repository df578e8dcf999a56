"""Requests as the servers want them, and chunks in the shapes that vLLM, SGLang, OpenAI and llama.cpp send."""

import json

import pytest

from glm5.bench.serve.api_formats import OpenAIChat, OpenAICompletions, Piece, RequestParams, SGLang, Usage, message_of
from glm5.bench.serve.failure import BAD_ANSWER, IN_STREAM, RequestFailed
from glm5.common.errors import ConfigError

ASKING = RequestParams("m", 0.0, None, ignore_eos=True, extra={})
CHAT, TEXT, SGLANG = OpenAIChat(ASKING), OpenAICompletions(ASKING), SGLang(ASKING)


def chat(delta, finish=None, **rest):
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **rest}).encode()


def text(part, finish=None, **rest):
    return json.dumps({"choices": [{"index": 0, "text": part, "finish_reason": finish, **rest}]}).encode()


def generated(part, finish=None, **meta):
    return json.dumps({"text": part, "meta_info": {"id": "1", "finish_reason": finish, **meta}}).encode()


@pytest.mark.parametrize(
    ("data", "want"),
    [
        (chat({"role": "assistant"}), Piece()),
        (chat({"role": "assistant", "content": ""}, usage=None), Piece()),
        (chat({"role": "assistant", "content": None, "reasoning_content": None}), Piece()),
        (chat({"content": "hi"}), Piece("hi", carries=True)),
        (chat({"role": "assistant", "content": "hi"}), Piece("hi", carries=True)),
        (chat({"content": None, "reasoning_content": "hm", "reasoning": "hm"}), Piece("", "hm", carries=True)),
        (chat({"reasoning": "hm"}), Piece("", "hm", carries=True)),
        (chat({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}), Piece(carries=True)),
        (chat({"refusal": "no"}), Piece(carries=True)),
        (chat({}, "stop"), Piece(finish="stop")),
        (chat({"content": ""}, "length"), Piece(finish="length")),
        (chat({"content": "x"}, "tool_calls"), Piece("x", carries=True, finish="tool_calls")),
        (chat({"content": "x"}, usage={"completion_tokens": 4, "prompt_tokens": 2}),
         Piece("x", carries=True, total=4, usage=Usage(2, 4))),
        ((b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": '
         b'{"cached_tokens": 4, "audio_tokens": 0}}}'), Piece(usage=Usage(5, 3, 4))),
        (b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": null}}',
         Piece(usage=Usage(5, 3))),
        (b'{"id": "x", "object": "chat.completion.chunk", "choices": []}', Piece()),
        (b'{"prompt_filter_results": []}', Piece()),
    ],
)  # fmt: skip
def test_chunks_of_chats(data, want):
    assert CHAT.read(data) == want


@pytest.mark.parametrize(
    ("data", "want"),
    [
        (text("hi"), Piece("hi", carries=True)),
        (text(""), Piece(carries=True)),  # half a character: a token all the same
        (text("", "stop"), Piece(finish="stop")),
        (text("x", "length"), Piece("x", carries=True, finish="length")),
        (text("xyz", token_ids=[1, 2, 3]), Piece("xyz", carries=True, added=3)),
        (b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}', Piece(usage=Usage(5, 3))),
    ],
)
def test_chunks_of_completions(data, want):
    assert TEXT.read(data) == want


def test_events_of_generate():
    usage = Usage(5, 3, 2, 1)
    data = generated("ab", completion_tokens=3, prompt_tokens=5, cached_tokens=2, spec_verify_ct=1)
    assert SGLANG.read(data) == Piece("ab", carries=True, total=3, usage=usage)
    data = generated("ab", {"type": "length", "length": 3}, completion_tokens=3, prompt_tokens=5)
    assert SGLANG.read(data) == Piece("ab", carries=True, finish="length", total=3, usage=Usage(5, 3))
    assert SGLANG.join("ab", "abc") == "abc"
    assert SGLANG.join("ab", "c") == "abc"


@pytest.mark.parametrize(
    ("dialect", "data", "kind", "message"),
    [
        (CHAT, b"{", BAD_ANSWER, "is no chunk"),
        (CHAT, b"[]", BAD_ANSWER, "is no chunk"),
        (CHAT, b'{"choices": 3}', BAD_ANSWER, "is no chunk"),
        (CHAT, b'{"error": {"message": "engine\\n died", "code": 500}}', IN_STREAM, "engine died"),
        (TEXT, b'{"error": "out of memory"}', IN_STREAM, "out of memory"),
        (TEXT, b'{"object": "error", "message": "bad", "code": 400}', IN_STREAM, "bad"),
        (CHAT, chat({}, "abort"), IN_STREAM, "finish reason abort"),
        (SGLANG, b"<html>", BAD_ANSWER, "is no event"),
        (SGLANG, b'{"error": {"message": "too long"}}', IN_STREAM, "too long"),
        (SGLANG, generated("", {"type": "abort", "message": "queue full"}), IN_STREAM, "queue full"),
    ],
)
def test_errors_have_a_kind_and_the_servers_words(dialect, data, kind, message):
    with pytest.raises(RequestFailed) as caught:
        dialect.read(data)
    assert caught.value.kind == kind
    assert message in caught.value.message


def test_bodies():
    assert json.loads(CHAT.body("hi", 9)) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert json.loads(TEXT.body([1, 2], 9))["prompt"] == [1, 2]
    assert json.loads(TEXT.body("hi", 9))["max_tokens"] == 9
    assert json.loads(SGLANG.body([1, 2], 9)) == {
        "input_ids": [1, 2],
        "stream": True,
        "sampling_params": {"max_new_tokens": 9, "temperature": 0.0, "ignore_eos": True},
    }
    assert json.loads(SGLANG.body("hi", 9))["text"] == "hi"


def test_tools_and_messages_go_as_they_are():
    messages, tools = [{"role": "system", "content": "s"}], [{"type": "function"}]
    body = json.loads(CHAT.body(messages, 1, tools))
    assert (body["messages"], body["tools"]) == (messages, tools)


def test_what_is_added_is_merged_and_ignore_eos_can_be_left_out():
    extra = {"stream_options": {"continuous_usage_stats": True}, "top_k": 3, "temperature": 1.0}
    body = json.loads(OpenAIChat(RequestParams("m", 0.0, 0.9, ignore_eos=False, extra=extra)).body("hi", 1))
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (body["top_k"], body["temperature"], body["top_p"]) == (3, 1.0, 0.9)
    assert "ignore_eos" not in body


@pytest.mark.parametrize("dialect", [TEXT, SGLANG])
def test_messages_need_a_chat_route(dialect):
    with pytest.raises(ConfigError, match="use --backend openai-chat"):
        dialect.body([{"role": "user", "content": "hi"}], 1)


def test_token_ids_need_another():
    with pytest.raises(ConfigError, match="use --backend openai or sglang"):
        CHAT.body([1, 2], 1)


@pytest.mark.parametrize(
    ("error", "want"),
    [
        ({"error": {"message": "a\nb"}}, "a b"),
        ({"detail": [{"msg": "x"}]}, "[{'msg': 'x'}]"),
        ({"code": 3}, "{'code': 3}"),
        ("x" * 400, "x" * 297 + "..."),
        (None, "None"),
    ],
)
def test_messages_of_errors(error, want):
    assert message_of(error) == want
