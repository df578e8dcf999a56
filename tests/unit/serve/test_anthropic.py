"""/v1/messages as Anthropic's client sees it: thinking, text and tools, streamed and whole, over several turns."""

import json

import anthropic
import httpx
import pytest

from glm5.chat.template import ChatTemplate
from glm5.config.serve import ServeConfig
from glm5.serve.app import create_app
from glm5.serve.http import sse
from glm5.serve.http.server import bind, serving
from tests.support.serving import key, scripted, served

TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
ASK = [{"role": "user", "content": "the weather in Paris?"}]
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
CALLS = (
    "let me see</think>I ask."
    + CALL
    + "\n<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><|observation|>"
)
THINK = {"type": "enabled", "budget_tokens": 40}


@pytest.fixture
def roomy(engine, monkeypatch):
    """A context that holds tools, spelled in letters."""
    monkeypatch.setattr(engine, "max_model_len", 4096)


@pytest.fixture
def client(scripted_server, engine, roomy):
    with anthropic.Anthropic(base_url=scripted_server[0], api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def model_client(model_server):
    with anthropic.Anthropic(base_url=model_server[0], api_key="none", max_retries=0, timeout=60) as client:
        yield client


def whole(client, messages=ASK, **options):
    return client.messages.create(**{"model": "tiny", "max_tokens": 100, "messages": messages, **options})


def streamed(client, messages=ASK, **options):
    """The message that the client builds from a stream, and the events."""
    with client.messages.stream(**{"model": "tiny", "max_tokens": 100, "messages": messages, **options}) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def blocks(message):
    """Without ids and signatures, which differ from answer to answer."""
    return [block.model_dump(exclude={"id", "signature"}, exclude_none=True) for block in message.content]


def wire(http, body):
    """Events of a stream, as (name, data)."""
    answer = http.post("/v1/messages", json={"model": "tiny", "max_tokens": 50, "messages": ASK, "stream": True} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.text.split("\n\n")
    assert end == ""
    pairs = [event.split("\n") for event in events]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def test_thinking_then_text(client, engine):
    engine.script = "I think</think>the answer<|user|>"
    message = whole(client, thinking=THINK)
    assert blocks(message) == [{"type": "thinking", "thinking": "I think"}, {"type": "text", "text": "the answer"}]
    assert message.content[0].signature
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert (message.type, message.model, message.id[:4]) == ("message", "tiny", "msg_")
    assert engine.params.thinking_token_budget == 40
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(engine.prompt_ids), 0)
    assert usage.output_tokens == len(engine.tokenizer.encode(engine.script))
    assert usage.output_tokens_details.thinking_tokens == len(engine.tokenizer.encode("I think"))


def test_without_thinking_the_first_block_is_the_text(client, engine):
    engine.script = "the answer<|user|>"
    for options in ({}, {"thinking": {"type": "disabled"}}):
        assert whole(client, **options).content[0].text == "the answer"
        assert engine.tokenizer.decode(engine.prompt_ids).endswith("<|assistant|></think>")
    engine.script = "x</think>the answer<|user|>"
    assert whole(client, thinking={"type": "adaptive"}).content[1].text == "the answer"
    assert engine.tokenizer.decode(engine.prompt_ids).endswith("<|assistant|><think>")


@pytest.mark.parametrize("tokens_per_step", [1, 3, 7, 1000])
def test_tools_streamed_and_whole(client, engine, tokens_per_step):
    engine.script, engine.tokens_per_step = CALLS, tokens_per_step
    message, events = streamed(client, tools=[TOOL], thinking=THINK)
    assert blocks(message) == [
        {"type": "thinking", "thinking": "let me see"},
        {"type": "text", "text": "I ask."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "name": "weather", "input": {"days": 3}},
    ]
    assert message.stop_reason == "tool_use"
    assert message.content[2].id.startswith("toolu_")
    assert message.content[2].id != message.content[3].id
    assert blocks(whole(client, tools=[TOOL], thinking=THINK)) == blocks(message)
    seen = [event.type for event in events]
    for kind in ("thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"):
        assert kind in seen


def test_the_events_come_in_anthropics_order(http, engine, roomy):
    engine.script = CALLS
    events = wire(http, {"tools": [TOOL], "thinking": THINK})
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events[:1] + events[-2:]] == ["message_start", "message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == (
        [],
        None,
        len(engine.prompt_ids),
    )
    shape = []
    for name, data in events[1:-2]:
        kind = data.get("delta", data.get("content_block", {})).get("type", "")
        if (entry := (data["index"], name, kind)) not in shape:
            shape.append(entry)
    expected = [("thinking", ["thinking_delta", "signature_delta"]), ("text", ["text_delta"])]
    expected += [("tool_use", ["input_json_delta"])] * 2
    assert shape == [
        entry
        for index, (block, deltas) in enumerate(expected)
        for entry in [
            (index, "content_block_start", block),
            *((index, "content_block_delta", delta) for delta in deltas),
            (index, "content_block_stop", ""),
        ]
    ]
    delta = events[-2][1]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len(engine.tokenizer.encode(CALLS))


def test_a_conversation_with_tools_goes_back_as_it_came(client, engine):
    engine.script = CALLS
    first = whole(client, tools=[TOOL], thinking=THINK)
    results = [
        {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "sun"},
        {
            "type": "tool_result",
            "tool_use_id": first.content[3].id,
            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "days"}],
            "is_error": True,
        },
    ]
    engine.script = "fine</think>sun<|user|>"
    turns = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    assert whole(client, turns, tools=[TOOL], thinking=THINK).content[1].text == "sun"
    prompt = engine.tokenizer.decode(engine.prompt_ids)
    assert "<|assistant|><think>let me see</think>I ask." + CALL in prompt
    assert "<|observation|><tool_response>sun</tool_response><tool_response>Error: no\ndays</tool_response>" in prompt
    assert prompt.endswith("<|assistant|><think>")
    # Text beside the results is what the user says next.
    turns[-1] = {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}
    whole(client, turns, tools=[TOOL])
    assert "</tool_response><|user|>go on<|assistant|>" in engine.tokenizer.decode(engine.prompt_ids)


def test_the_system_is_a_text_or_blocks(client, engine):
    engine.script = "x<|user|>"
    block = {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}
    for system in ("be kind", [block]):
        whole(client, system=system)
        assert "<|system|>be kind<|user|>" in engine.tokenizer.decode(engine.prompt_ids)
    whole(client, [{"role": "user", "content": [block, {"type": "text", "text": "now"}]}], system=[block, block])
    assert "<|system|>be kind\nbe kind<|user|>be kind\nnow<|assistant|>" in engine.tokenizer.decode(engine.prompt_ids)
    whole(client, [*ASK, {"role": "system", "content": "stop"}, *ASK])
    assert "<|system|>stop<|user|>" in engine.tokenizer.decode(engine.prompt_ids)


def test_thinking_that_is_not_shown_comes_back_in_its_signature(client, engine):
    engine.script = "secret\u00fc</think>ok<|user|>"
    hidden = {"type": "adaptive", "display": "omitted"}
    for message in (whole(client, thinking=hidden), streamed(client, thinking=hidden)[0]):
        assert message.content[0].thinking == ""
        turns = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": "and?"}]
        keep_all = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        whole(client, turns, thinking=THINK, extra_body={"context_management": keep_all})
        assert "<think>secret\u00fc</think>ok" in engine.tokenizer.decode(engine.prompt_ids)
        whole(client, turns, thinking=THINK)
        assert "secret" not in engine.tokenizer.decode(engine.prompt_ids)


def test_what_another_model_thought_is_no_error(client, engine):
    engine.script = "x<|user|>"
    content = [
        {"type": "redacted_thinking", "data": "abc"},
        {"type": "thinking", "thinking": "", "signature": "RXJyb3I="},
        {"type": "text", "text": "hello"},
    ]
    whole(client, [*ASK, {"role": "assistant", "content": content}, *ASK])
    assert "<|assistant|></think>hello<|user|>" in engine.tokenizer.decode(engine.prompt_ids)


def test_an_answer_begun_by_the_client_goes_on(client, engine):
    engine.script = "swer<|user|>"
    assert whole(client, [*ASK, {"role": "assistant", "content": "the an"}]).content[0].text == "swer"
    assert engine.tokenizer.decode(engine.prompt_ids).endswith("<|assistant|></think>the an")


def test_tool_choice_and_strict_tools_are_held_by_grammars(model_client):
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        options = {"tools": [TOOL], "tool_choice": choice, "thinking": THINK | {"budget_tokens": 5}, "max_tokens": 30}
        message = whole(model_client, **options)
        uses = [block for block in message.content if block.type == "tool_use"]
        assert uses or message.stop_reason == "max_tokens"
        assert all(use.name == "weather" for use in uses)
    flag = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tool = {"name": "switch", "input_schema": flag, "strict": True}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = whole(model_client, tools=[tool], tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"
    assert set(map(type, message.content[0].input.values())) == {bool}


def test_a_budget_ends_the_thinking(model_client):
    usage = whole(model_client, thinking={"type": "enabled", "budget_tokens": 3}, max_tokens=20).usage
    assert usage.output_tokens_details.thinking_tokens <= 3


def test_a_model_that_always_thinks():
    """It does so where nothing is said too, and cannot be told not to."""
    engine = scripted("hm</think>x<|user|>")
    template = ChatTemplate.bundled("glm-5.3", engine.tokenizer)
    app = create_app(engine, template, engine.tokenizer, ServeConfig(model="org/tiny", served_model_name=("tiny",)))
    with serving(app, engine, bind("127.0.0.1", 0)) as url:
        body = {"messages": ASK, "max_tokens": 5}
        content = httpx.post(f"{url}/v1/messages", json=body).json()["content"]
        assert [block["type"] for block in content] == ["thinking", "text"]
        reported = httpx.post(f"{url}/v1/messages", json=body | {"thinking": {"type": "disabled"}}).json()["error"]
    assert reported["param"] == "thinking"
    assert "this model always thinks" in reported["message"]


def test_leaving_a_stream_aborts(client, engine):
    engine.script, engine.hangs = "abc", True
    with client.messages.stream(model="tiny", max_tokens=5, messages=ASK) as stream:
        assert next(iter(stream)).type == "message_start"
        assert not engine.left.is_set()
    assert engine.left.wait(20)


def test_tool_choice_none_calls_nothing(client, engine):
    engine.script = CALL + "<|user|>"
    assert whole(client, tools=[TOOL], tool_choice={"type": "none"}).content[0].text == CALL


def test_a_format_is_held(model_client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    options = {"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}}
    assert json.loads(whole(model_client, **options).content[0].text)["a"] in (1, 2)


def test_stop_sequences_and_lengths(model_client):
    options = {"extra_body": {"temperature": 0}, "max_tokens": 12}
    message = whole(model_client, **options)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 12
    text = message.content[0].text
    stop = text[5:8]
    message = whole(model_client, **options, stop_sequences=["\u00e9\u00e9\u00e9", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]
    again, _ = streamed(model_client, **options, stop_sequences=[stop])
    assert (again.stop_reason, again.stop_sequence, blocks(again)) == ("stop_sequence", stop, blocks(message))


def test_what_is_cached_is_no_input(model_client):
    turn = [{"role": "user", "content": "the answer is: " * 30}]
    first, second = (whole(model_client, turn, max_tokens=1).usage for _ in range(2))
    total = first.input_tokens + first.cache_read_input_tokens
    assert second.cache_read_input_tokens > 0
    assert second.input_tokens + second.cache_read_input_tokens == total
    counted = model_client.messages.count_tokens(model="tiny", messages=turn)
    assert counted.input_tokens == total


def test_tokens_are_counted_with_system_and_tools(client, engine):
    engine.script = "x<|user|>"
    options = {"system": "be kind", "tools": [TOOL], "thinking": THINK}
    whole(client, **options)
    assert client.messages.count_tokens(model="tiny", messages=ASK, **options).input_tokens == len(engine.prompt_ids)


def test_an_error_in_the_stream_is_its_last_event(client, http, engine):
    engine.script, engine.fails = "abc", RuntimeError("secret")
    with pytest.raises(anthropic.APIStatusError, match="internal error") as caught:
        streamed(client)
    assert "secret" not in str(caught.value.body)
    name, data = wire(http, {})[-1]
    assert (name, data["type"], data["error"]["type"]) == ("error", "error", "api_error")


def test_an_answer_that_somebody_else_ended(client, engine):
    engine.script, engine.finish_reason = "abc", "abort"
    assert whole(client).stop_reason == "abort"


def test_pings_come_while_nothing_else_does(client, engine, scripted_server, monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    engine.script, engine.hangs = "abc<|user|>", True
    body = {"model": "tiny", "max_tokens": 50, "messages": ASK, "stream": True}
    with httpx.stream("POST", scripted_server[0] + "/v1/messages", json=body, timeout=20) as answer:
        lines = answer.iter_lines()
        for line in lines:
            if line == "event: ping":
                break
        assert json.loads(next(lines).removeprefix("data: ")) == {"type": "ping"}
        engine.release()
        assert [line for line in lines if line.startswith("event: ")][-1] == "event: message_stop"


def said(*blocks, role="user"):
    return {"messages": [*ASK, {"role": role, "content": list(blocks)}]}


PICTURE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
# fields, message, param
BAD = [
    ({"max_tokens": ...}, "max_tokens is missing", "max_tokens"),
    ({"max_tokens": 0}, "max_tokens is 0; allowed: at least 1", "max_tokens"),
    ({"messages": []}, "messages is []", "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing", "messages[0].content"),
    (said(PICTURE), "messages[1].content[0].type is 'image', which is not supported", "messages[1].content[0]"),
    (said({"type": "document"}), "is 'document', which is not supported", "messages[1].content[0]"),
    (said({"type": "tool_result", "tool_use_id": "a", "content": [PICTURE]}),
     "messages[1].content[0].content[0].type is 'image'", "messages[1].content[0].content[0]"),
    (said({"type": "tool_use", "id": "a", "name": "f", "input": []}, role="assistant"),
     "messages[1].content[0].input is []", "messages[1].content[0].input"),
    (said(role="assistant"), "messages: a final assistant message is continued", "messages"),
    ({"system": 3}, "system is 3; allowed: a text, or a list of blocks", "system"),
    ({"temperature": -1}, "temperature is -1.0; allowed: 0 (greedy) to 100", "temperature"),
    ({"top_k": -5}, "top_k is -5; allowed: ", "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences is ['']; allowed: ", "stop_sequences"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type is 'between_tools'; allowed: ", "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens is -1; allowed: ",
     "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "`max_tokens` must be greater than `thinking.budget",
     "thinking.budget_tokens"),
    ({"tool_choice": {"type": "any"}}, "tool_choice requires a call, but there are no tools", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names 'f'", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing", "tool_choice.name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'",
     "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is null; allowed: a JSON schema", "tools[0].input_schema"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported by this server: leave it out; allowed: []", "mcp_servers"),
    ({"speed": "fast"}, 'speed is not supported by this server: leave it out; allowed: "standard"', "speed"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0] is ",
     "context_management.edits[0]"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'; allowed: ", "output_config.effort"),
    ({"max_tokens": 500}, "input length and `max_tokens` exceed context limit: 13 + 500 > 512, ", "max_tokens"),
    ({"messages": [{"role": "user", "content": "x y " * 300}]}, "prompt is too long: ", "messages"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "prompt is too long: ", "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field_in_anthropics_envelope(http, engine, fields, message, param, stream):
    engine.script = "x<|user|>"
    body = {"model": "tiny", "max_tokens": 5, "messages": ASK, "stream": stream} | fields
    body = {key: value for key, value in body.items() if value is not ...}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    content = answer.json()
    assert (content["type"], content["request_id"]) == ("error", answer.headers["x-request-id"])
    error = content["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


def test_thinking_between_tool_calls_may_have_a_larger_budget(client, engine):
    """As Anthropic's beta of the name has it: the budget is of all calls together."""
    engine.script = "hm</think>yes<|user|>"
    headers = {"anthropic-beta": "other-2025-01-01,interleaved-thinking-2025-05-14"}
    assert whole(client, thinking=THINK, max_tokens=20, extra_headers=headers).content[1].text == "yes"
    with pytest.raises(anthropic.BadRequestError, match="must be greater than"):
        whole(client, thinking=THINK, max_tokens=20)


def test_other_errors_have_anthropics_types(client, http, engine):
    with pytest.raises(anthropic.NotFoundError, match="the model 'gpt' does not exist") as caught:
        whole(client, model="gpt")
    assert caught.value.body["error"]["type"] == "not_found_error"
    engine.script, engine.finish_reason, engine.stopped_because = "abc", "abort", "it was closed"
    with pytest.raises(anthropic.APIStatusError, match="it was closed") as caught:
        whole(client)
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (503, "overloaded_error")
    answer = http.get("/v1/messages")
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")
    answer = http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["details"]) == (400, {"error_code": "invalid_json"})


def test_keys_and_limits():
    """The key comes as x-api-key or as a bearer's; refusals have Anthropic's types and say when to come back."""
    with served(scripted("x<|user|>"), key("secret", requests_per_minute=2)) as http:
        url, options = str(http.base_url), {"max_retries": 0, "timeout": 20}
        with anthropic.Anthropic(base_url=url, api_key="wrong", **options) as client:
            with pytest.raises(anthropic.AuthenticationError, match="a valid API key is needed") as caught:
                whole(client)
            assert caught.value.body["error"]["type"] == "authentication_error"
        with anthropic.Anthropic(base_url=url, auth_token="secret", **options) as client:
            assert whole(client).content[0].text == "x"
        with anthropic.Anthropic(base_url=url, api_key="secret", **options) as client:
            assert whole(client).content[0].text == "x"
            with pytest.raises(anthropic.RateLimitError) as caught:
                whole(client)
            assert caught.value.body["error"]["type"] == "rate_limit_error"
            assert int(caught.value.response.headers["retry-after"]) > 0


def test_what_claude_code_sends(http, engine, roomy):
    """A request of the agent, with everything that it sends beside the conversation."""
    engine.script, engine.tokens_per_step = CALLS, 2
    reminder = {"type": "text", "text": "<system-reminder>\nbe brief\n</system-reminder>\n"}
    cached = {"type": "ephemeral", "ttl": "1h"}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [reminder, {"type": "text", "text": "hi", "cache_control": cached}]}],
        "system": [
            {"type": "text", "text": "You are an agent."},
            {"type": "text", "text": "Be good.", "cache_control": cached},
        ],
        "tools": [TOOL | {"eager_input_streaming": True}, TOOL | {"name": "later", "defer_loading": True}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "max_tokens": 64,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "k"}
    answer = http.post("/v1/messages", params={"beta": "true"}, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    names = [line.removeprefix("event: ") for line in answer.text.split("\n") if line.startswith("event: ")]
    assert names[0] == "message_start"
    assert names.count("content_block_start") == names.count("content_block_stop") == 4
    prompt = engine.tokenizer.decode(engine.prompt_ids)
    assert "<|system|>You are an agent.\nBe good.<|user|><system-reminder>" in prompt
    assert '"name": "weather"' in prompt
    assert '"name": "later"' not in prompt
    body |= {"tools": [], "max_tokens": 1}
    del body["stream"]
    assert http.post("/v1/messages", params={"beta": "true"}, json=body, headers=headers).status_code == 200
    del body["max_tokens"]
    counted = http.post("/v1/messages/count_tokens", params={"beta": "true"}, json=body, headers=headers)
    assert counted.json() == {"input_tokens": len(engine.prompt_ids)}


def test_unknown_fields_are_ignored_and_logged_once(http, engine, caplog):
    engine.script = "x<|user|>"
    for _ in range(2):
        body = {"max_tokens": 5, "messages": ASK, "a_wish": 1, "metadata": {"user_id": "me"}}
        assert http.post("/v1/messages", json=body).status_code == 200
    assert len([record for record in caplog.records if "'a_wish'" in record.getMessage()]) == 1
    assert "'metadata'" not in caplog.text
