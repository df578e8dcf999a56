"""Chat completions as OpenAI's client sees them: reasoning, content, tool calls, streamed and whole."""

import json

import openai
import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
ASK = [{"role": "user", "content": "the weather in Paris?"}]
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
CALLS = (
    "let me see</think>I ask."
    + CALL
    + "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><|observation|>"
)


@pytest.fixture
def client(scripted_server, engine):
    with openai.OpenAI(base_url=scripted_server[0] + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def whole(client, **options):
    return client.chat.completions.create(model="tiny", messages=ASK, **options)


def streamed(client, **options):
    return list(client.chat.completions.create(model="tiny", messages=ASK, stream=True, **options))


def joined(chunks) -> dict:
    """The message that a client builds from a stream."""
    message = {"content": None, "reasoning_content": None, "tool_calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_none=True)
            for key in ("content", "reasoning_content"):
                if key in delta:
                    message[key] = (message[key] or "") + delta[key]
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def test_reasoning_apart_from_content(client, engine):
    engine.script = "I think</think>the answer<|user|>"
    answer = whole(client)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("the answer", "I think", "I think")
    assert message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"


def test_thinking_off_is_all_content(client, engine):
    engine.script = "the answer<|user|>"
    for options in ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"}):
        message = whole(client, **options).choices[0].message
        assert (message.content, message.reasoning_content) == ("the answer", None)
        assert engine.tokenizer.decode(engine.prompt_ids).endswith("<|assistant|></think>")


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5, 7, 1000])
def test_tool_calls_streamed_and_whole(client, engine, tokens_per_step):
    engine.script, engine.tokens_per_step = CALLS, tokens_per_step
    chunks = streamed(client, tools=[TOOL])
    message = joined(chunks)
    assert message["reasoning_content"] == "let me see"
    assert message["content"] == "I ask."
    assert [call["name"] for call in message["tool_calls"]] == ["weather", "weather"]
    assert [json.loads(call["arguments"]) for call in message["tool_calls"]] == [{"city": "Paris"}, {"days": 3}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]

    answer = whole(client, tools=[TOOL]).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert (answer.message.content, answer.message.reasoning_content) == ("I ask.", "let me see")
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
    assert calls == [(call["name"], call["arguments"]) for call in message["tool_calls"]]
    assert all(call.type == "function" for call in answer.message.tool_calls)


def test_tool_choice_none_shows_no_tools_and_reads_no_calls(client, engine):
    engine.script = "</think>" + CALL
    answer = whole(client, tools=[TOOL], tool_choice="none").choices[0]
    assert answer.message.content == CALL
    assert answer.message.tool_calls is None
    assert answer.finish_reason == "stop"
    assert "# Tools" not in engine.tokenizer.decode(engine.prompt_ids)
    whole(client, tools=[TOOL], tool_choice="auto")
    assert "# Tools" in engine.tokenizer.decode(engine.prompt_ids)


def test_a_call_cut_off_by_length_stays_a_partial_call(client, engine):
    engine.script, engine.finish_reason = "</think>" + CALL[: CALL.index("ris<")], "length"
    answer = whole(client, tools=[TOOL]).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls[0].function.arguments == '{"city": "Pa'


def test_results_of_tools_go_back(client, engine):
    engine.script = "</think>fine<|user|>"
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    client.chat.completions.create(model="tiny", messages=history, tools=[TOOL])
    prompt = engine.tokenizer.decode(engine.prompt_ids)
    assert CALL in prompt
    assert "<|observation|><tool_response>sun</tool_response><|assistant|><think>" in prompt


def test_the_first_chunk_has_the_role_and_usage_comes_last_on_request(client, engine):
    engine.script = "a</think>b<|user|>"
    chunks = streamed(client, stream_options={"include_usage": True})
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant"] + [None] * (len(chunks) - 2)
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(engine.prompt_ids), 4)
    assert usage.total_tokens == usage.prompt_tokens + 4
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any(chunk.usage for chunk in streamed(client))
    assert whole(client).usage.completion_tokens == 4


def test_the_wire_is_events_that_end_with_done(http, engine):
    engine.script = "\u00fcber</think>\u4f60\u597d<|user|>"
    answer = http.post("/v1/chat/completions", json={"messages": ASK, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "\u4f60\u597d"
    assert all("usage" not in chunk for chunk in chunks)


def test_sampling_reaches_the_engine(client, engine):
    engine.script = "</think>x"
    extra = {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [7]}
    whole(client, temperature=0.5, top_p=0.9, seed=3, stop=["a", "b"], max_completion_tokens=9, extra_body=extra)
    params = engine.params
    assert (params.temperature, params.top_p, params.seed, params.stop, params.max_tokens) == (
        0.5, 0.9, 3, ("a", "b"), 9)  # fmt: skip
    assert (params.top_k, params.min_p, params.min_tokens, params.ignore_eos) == (5, 0.1, 2, True)
    assert params.stop_token_ids == (7,)
    assert not params.skip_special_tokens
    whole(client, max_tokens=4)
    assert engine.params.max_tokens == 4
    whole(client)
    assert engine.params.max_tokens == engine.max_model_len - len(engine.prompt_ids)


def test_content_may_come_in_parts_and_null_means_not_given(http, engine):
    engine.script = "</think>x"
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    body = {"model": None, "messages": [{"role": "user", "content": parts}], "temperature": None, "stop": None}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert "<|user|>one two<|assistant|>" in engine.tokenizer.decode(engine.prompt_ids)


def test_an_answer_is_named_after_its_request(http, engine):
    engine.script = "</think>x"
    for body, headers, name in (
        ({"request_id": "mine"}, {}, "chatcmpl-mine"),
        ({}, {"x-request-id": "theirs"}, "chatcmpl-theirs"),
        ({"request_id": "mine"}, {"x-request-id": "theirs"}, "chatcmpl-mine"),
    ):
        answer = http.post("/v1/chat/completions", json={"messages": ASK, **body}, headers=headers)
        assert answer.json()["id"] == name
    ids = {http.post("/v1/chat/completions", json={"messages": ASK}).json()["id"] for _ in range(2)}
    assert len(ids) == 2


def test_an_error_after_the_first_chunk_is_the_last_event(client, engine):
    engine.script, engine.fails = "abc", RuntimeError("secret")
    with pytest.raises(openai.APIError, match="internal error") as caught:
        streamed(client)
    assert "secret" not in str(caught.value.body)


def test_an_engine_that_closes_says_so(client, engine, monkeypatch):
    engine.script, engine.finish_reason, generate = "abc", "abort", engine.generate

    def closing(*args, **options):
        engine.stopped_because = "it was closed"
        return generate(*args, **options)

    monkeypatch.setattr(engine, "generate", closing)
    with pytest.raises(openai.APIError, match="the server is closing"):
        streamed(client)
    engine.stopped_because = None
    with pytest.raises(openai.InternalServerError, match="the server is closing"):
        whole(client)


def test_an_answer_that_somebody_else_ended(client, engine):
    engine.script, engine.finish_reason = "abc", "abort"
    assert streamed(client)[-1].choices[0].finish_reason == "abort"
    assert whole(client).choices[0].finish_reason == "abort"


def test_unknown_fields_are_ignored_and_logged_once(http, engine, caplog):
    engine.script = "x"
    for _ in range(2):
        body = {"messages": ASK, "wishes": "many", "user": "me"}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert len([record for record in caplog.records if "'wishes'" in record.getMessage()]) == 1
    assert "'user'" not in caplog.text
