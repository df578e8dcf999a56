"""/v1/responses as OpenAI's client sees it: items, streamed and whole, over several turns, stored and not."""

import json

import httpx
import openai
import pydantic
import pytest

from glm5.serve.service.response_store import ResponseStore, Stored
from tests.support.serving import bearer, key, scripted, served

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "strict": False,
}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
CALLS = (
    "let me see</think>I ask."
    + CALL
    + "\n<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><|observation|>"
)
ASK = "the weather in Paris?"


@pytest.fixture
def roomy(engine, monkeypatch):
    """A context that holds tools, spelled in letters."""
    monkeypatch.setattr(engine, "max_model_len", 4096)


@pytest.fixture
def client(scripted_server, engine, roomy):
    with openai.OpenAI(base_url=scripted_server[0] + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def model_client(model_server):
    with openai.OpenAI(base_url=model_server[0] + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def whole(client, given=ASK, **options):
    return client.responses.create(**{"model": "tiny", "input": given, **options})


def streamed(client, given=ASK, **options):
    """The response that the client builds from a stream, and the events."""
    with client.responses.stream(**{"model": "tiny", "input": given, **options}) as stream:
        events = list(stream)
        return stream.get_final_response(), events


def items(response):
    """Without ids, which differ from response to response."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in response.output]


def wire(http, **body):
    answer = http.post("/v1/responses", json={"input": ASK, "stream": True} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.text.split("\n\n")
    assert end == ""
    pairs = [event.split("\n") for event in events]
    found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def prompt_of(engine):
    return engine.tokenizer.decode(engine.prompt_ids)


def test_reasoning_and_a_message(client, engine):
    engine.script = "I think</think>the answer<|user|>"
    response = whole(client, instructions="be kind", metadata={"a": "b"}, user="me")
    reasoning, message = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "I think", [])
    assert (message.role, message.content[0].type, response.output_text) == ("assistant", "output_text", "the answer")
    assert (response.status, response.object, response.id[:5]) == ("completed", "response", "resp_")
    assert (response.metadata, response.instructions, response.user) == ({"a": "b"}, "be kind", "me")
    assert prompt_of(engine).endswith(f"<|system|>be kind<|user|>{ASK}<|assistant|><think>")
    usage, count = response.usage, len(engine.tokenizer.encode(engine.script))
    assert (usage.input_tokens, usage.output_tokens) == (len(engine.prompt_ids), count)
    assert usage.total_tokens == usage.input_tokens + count
    assert usage.output_tokens_details.reasoning_tokens == len(engine.tokenizer.encode("I think"))


@pytest.mark.parametrize("tokens_per_step", [1, 3, 7, 1000])
def test_calls_streamed_and_whole(client, engine, tokens_per_step):
    engine.script, engine.tokens_per_step = CALLS, tokens_per_step
    response, events = streamed(client, tools=[TOOL])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = response.output[2:]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}, {"days": 3}]
    assert len({call.call_id for call in calls}) == 2
    assert all(item.status == "completed" for item in response.output)
    assert items(whole(client, tools=[TOOL])) == [
        {key: value for key, value in item.items() if key != "parsed_arguments"} for item in items(response)
    ]
    snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
    assert snapshots[-1] == calls[1].arguments


def test_the_events_come_in_openais_order(http, engine, roomy):
    engine.script = CALLS
    events = wire(http, tools=[TOOL])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    in_turn = [kind for i, kind in enumerate(kinds) if not kind.endswith(".delta") or kinds[i - 1] != kind]
    text = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    expected = [
        [kind.format("reasoning_text") for kind in text],
        [kind.format("output_text") for kind in text],
        call,
        call,
    ]
    assert in_turn[2:-1] == [kind for inner in expected for kind in ("output_item.added", *inner, "output_item.done")]
    for index in range(4):
        of_item = [event for event in events if event.get("output_index") == index]
        added, done = of_item[0]["item"], of_item[-1]["item"]
        assert {event.get("item_id", added["id"]) for event in of_item} == {added["id"]} == {done["id"]}
        assert (added["status"], done["status"]) == ("in_progress", "completed")
        deltas = "".join(event["delta"] for event in of_item if event["type"].endswith(".delta"))
        assert deltas == (done["arguments"] if index > 1 else done["content"][0]["text"])
    assert events[0]["response"]["output"] == events[1]["response"]["output"] == []
    assert events[-1]["response"]["output"] == [
        event["item"] for event in events if event["type"] == "response.output_item.done"
    ]


def test_a_conversation_goes_back_as_items(client, engine):
    engine.script = CALLS
    first = whole(client, tools=[TOOL], store=False)
    results = [
        {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": first.output[3].call_id,
            "output": [{"type": "input_text", "text": "three"}],
        },
    ]
    engine.script = "fine</think>sun<|user|>"
    given = [{"role": "user", "content": ASK}, *first.output, *results]
    assert whole(client, given, tools=[TOOL]).output_text == "sun"
    turn = "<|assistant|><think>let me see</think>I ask." + CALL
    assert turn in prompt_of(engine)
    end = "<|observation|><tool_response>sun</tool_response><tool_response>three</tool_response><|assistant|><think>"
    assert prompt_of(engine).endswith(end)


def test_items_in_all_their_forms(client, engine):
    engine.script = "</think>x<|user|>"
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "go"},
    ]
    whole(client, given, reasoning={"context": "all_turns"})
    expected = (
        "<|system|>be brief<|user|>one\ntwo<|assistant|><think></think>a<|assistant|><think>hm</think><tool_call>f"
        "<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><|observation|><tool_response>r</tool_response>"
        "<|assistant|><think></think>b<|user|>go<|assistant|><think>"
    )
    assert prompt_of(engine).endswith(expected)
    whole(client, given, reasoning={"context": "current_turn"})
    assert "hm" not in prompt_of(engine)


def test_reasoning_is_switched_and_sealed(client, engine):
    engine.script = "the answer<|user|>"
    assert whole(client, reasoning={"effort": "none"}).output_text == "the answer"
    assert prompt_of(engine).endswith("<|assistant|></think>")
    engine.script = "secret</think>x<|user|>"
    response = whole(client, include=["reasoning.encrypted_content"], store=False, reasoning={"effort": "high"})
    encrypted = response.output[0].encrypted_content
    assert encrypted
    assert "secret" not in encrypted
    given = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": encrypted},
    ]
    whole(client, [*given, {"role": "assistant", "content": "b"}])
    assert "<|assistant|><think>secret</think>b" in prompt_of(engine)


def test_a_response_goes_on_from_a_stored_one(client, engine):
    engine.script = "hm</think>one<|user|>"
    first = whole(client, "a", instructions="be kind")
    engine.script = "</think>two<|user|>"
    second = whole(client, "b", previous_response_id=first.id)
    assert prompt_of(engine).endswith("<|user|>a<|assistant|></think>one<|user|>b<|assistant|><think>")
    assert "be kind" not in prompt_of(engine)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == "one"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(first.id)
    # What goes on from it has all it needs.
    third = whole(client, [{"type": "item_reference", "id": second.output[-1].id}, {"role": "user", "content": "c"}],
                  previous_response_id=second.id)  # fmt: skip
    assert "<|user|>a<|assistant|></think>one<|user|>b<|assistant|></think>two" in prompt_of(engine)
    requested = client.responses.input_items.list(third.id, order="asc").data
    assert [item.type for item in requested] == [
        "message",
        "reasoning",
        "message",
        "message",
        "message",
        "message",
        "message",
    ]
    page = client.responses.input_items.list(third.id, limit=2)
    assert page.data[0].content[0].text if isinstance(page.data[0].content, list) else page.data[0].content == "c"
    assert page.has_more
    rest = client.responses.input_items.list(third.id, limit=100, after=page.data[-1].id)
    assert [item.id for item in [*page.data, *rest.data]] == [item.id for item in requested][::-1]


def test_what_is_not_stored_is_not_there(client, engine):
    engine.script = "</think>one<|user|>"
    response = whole(client, store=False)
    assert response.store is False
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(response.id)
    with pytest.raises(openai.BadRequestError, match="which is not stored") as caught:
        whole(client, previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_response_is_cancelled_while_it_is_written(model_client):
    requested = {"extra_body": {"ignore_eos": True}, "stream": True, "max_output_tokens": 900}
    stream = whole(model_client, **requested)
    first = next(iter(stream))
    assert model_client.responses.retrieve(first.response.id).status == "in_progress"
    assert model_client.responses.cancel(first.response.id).status == "cancelled"
    *_, last = stream
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert 0 < last.response.usage.output_tokens < 900
    assert model_client.responses.retrieve(first.response.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="the response is cancelled; allowed: one that is in progress"):
        model_client.responses.cancel(first.response.id)


def test_nobody_sees_the_responses_of_another():
    engine = scripted("</think>secret<|user|>")
    with served(engine, key("alice"), key("bob")) as client:
        own = client.post("/v1/responses", json={"input": "x"}, headers=bearer("alice")).json()
        path, bob = f"/v1/responses/{own['id']}", bearer("bob")
        assert client.get(path, headers=bearer("alice")).json()["id"] == own["id"]
        for answer in (
            client.get(path, headers=bob),
            client.get(f"{path}/input_items", headers=bob),
            client.delete(path, headers=bob),
            client.post(f"{path}/cancel", headers=bob),
        ):
            assert answer.status_code == 404
        body = {"input": "x", "previous_response_id": own["id"]}
        assert client.post("/v1/responses", json=body, headers=bob).status_code == 400
        body = {"input": [{"type": "item_reference", "id": own["output"][0]["id"]}]}
        assert client.post("/v1/responses", json=body, headers=bob).status_code == 400
        assert client.post("/v1/responses", json=body, headers=bearer("alice")).status_code == 200


def test_the_store_is_bounded():
    def stored(name, previous=None, text=""):
        before, earlier = (0, []) if previous is None else (previous.size, previous.items)
        return Stored({"id": name, "output": [{"id": f"m{name}"}]}, [], earlier, before + 10 + len(text))

    def held(tenant):
        return {name for stored in store.holders(tenant, {f"m{c}" for c in "abcdefg"}) for name in stored.item_ids}

    store = ResponseStore(max_responses=2, max_bytes=1000)
    for name in "abc":
        store.keep("alice", stored(name))
    assert [store.find("alice", name) is not None for name in "abc"] == [False, True, True]
    store.find("alice", "b")
    store.keep("alice", stored("d"))
    assert [store.find("alice", name) is not None for name in "bcd"] == [True, False, True]
    assert held("alice") == {"mb", "md"}
    assert held("bob") == set()
    long = stored("e", text="x" * 500)
    store.keep("alice", long)
    # Each counts with all before it, so that a long conversation does not hide in its last turn.
    last = stored("f", long, "x" * 300)
    assert last.size == 820
    store.keep("alice", last)
    assert [store.find("alice", name) is not None for name in "ef"] == [False, True]
    store.keep("alice", stored("g", text="x" * 2000))
    assert held("alice") == set()


def test_structured_output_is_parsed(model_client):
    class Flag(pydantic.BaseModel):
        on: bool

    response = model_client.responses.parse(
        model="tiny", input=ASK, text_format=Flag, reasoning={"effort": "none"}, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Flag)
    options = {"reasoning": {"effort": "none"}, "max_output_tokens": 60}
    answer = whole(model_client, text={"format": {"type": "json_object"}}, **options)
    assert answer.output_text.startswith("{")
    assert answer.status == "incomplete" or isinstance(json.loads(answer.output_text), dict)


def test_calls_are_forced(model_client):
    flag = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    switch = {"type": "function", "name": "switch", "parameters": flag, "strict": True}
    options = {"reasoning": {"effort": "none"}, "max_output_tokens": 300, "parallel_tool_calls": False}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "switch"}]}
    for choice in ("required", {"type": "function", "name": "switch"}, allowed):
        (call,) = whole(model_client, tools=[switch, TOOL][: 1 if choice == "required" else 2], tool_choice=choice,
                        **options).output  # fmt: skip
        assert call.name == "switch"
        assert set(map(type, json.loads(call.arguments).values())) == {bool}


def test_log_probabilities_are_of_the_text(model_client, client, engine):
    response = whole(
        model_client,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        reasoning={"effort": "none"},
        max_output_tokens=5,
        extra_body={"ignore_eos": True},
    )
    logprobs = response.output[0].content[0].logprobs
    assert 0 < len(logprobs) <= 5
    assert all(len(one.top_logprobs) == 2 and one.logprob <= one.top_logprobs[0].logprob for one in logprobs)
    options = {"include": ["message.output_text.logprobs"], "reasoning": {"effort": "none"}, "max_output_tokens": 5}
    events = whole(model_client, **options, stream=True)
    assert any(event.logprobs for event in events if event.type == "response.output_text.delta")
    engine.script = "</think>x<|user|>"
    assert whole(client).output[-1].content[0].logprobs == []


def test_an_answer_that_is_too_long_is_incomplete(client, engine):
    engine.script, engine.finish_reason = "</think>" + CALL[: CALL.index("ris<")], "length"
    response = whole(client, tools=[TOOL], max_output_tokens=60)
    assert engine.params.max_tokens == 60
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output[0].status, response.output[0].arguments) == ("incomplete", '{"city": "Pa')
    *_, last = whole(client, tools=[TOOL], stream=True)
    assert last.type == "response.incomplete"
    # What was cut off can be gone on from.
    engine.script, engine.finish_reason = "</think>x<|user|>", "stop"
    results = [{"type": "function_call_output", "call_id": response.output[0].call_id, "output": "?"}]
    assert whole(client, results, previous_response_id=response.id).output_text == "x"


def test_an_error_in_the_stream_ends_the_response(client, http, engine):
    engine.script, engine.fails = "</think>abc", RuntimeError("secret")
    last = wire(http)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(last)
    assert http.get(f"/v1/responses/{last['response']['id']}").status_code == 404
    with pytest.raises(openai.InternalServerError, match="internal error"):
        whole(client)


PICTURE = {"type": "input_image", "image_url": "http://x/y.png"}
# fields, message, param
BAD = [
    ({"input": ...}, "input is missing", "input"),
    ({"input": []}, "input is []; allowed: a text, or a list of at least one item", "input"),
    ({"input": [3]}, "input[0] is 3; allowed: an object", "input[0]"),
    ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role is 'judge'", "input[0].role"),
    ({"input": [{"role": "user", "content": [PICTURE]}]}, "input[0].content[0].type is 'input_image', which is not",
     "input[0].content[0]"),
    ({"input": [{"type": "computer_call_output"}]}, "input[0].type is 'computer_call_output', which is not supported",
     "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments is '['",
     "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id is null", "input[0].call_id"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id is 'msg_1', which no stored response has",
     "input[0].id"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type is 'custom'; allowed: function, namespace", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name is null", "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice requires a call, but there are no tools", "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice is {'type': 'mcp'}; allowed: ", "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens is 0; allowed: at least 1", "max_output_tokens"),
    ({"max_output_tokens": 5000}, "the context holds 512 tokens", "max_output_tokens"),
    ({"input": "x" * 100_000}, "the context holds 512 tokens", "input"),
    ({"temperature": -1}, "temperature is -1.0; allowed: ", "temperature"),
    ({"include": ["everything"]}, "include holds 'everything'; allowed: ", "include"),
    ({"text": {"format": {"type": "xml"}}}, "text.format is {'type': 'xml'}; allowed: ", "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity is 'low'; allowed: 'medium'", "text.verbosity"),
    ({"reasoning": {"effort": "some"}}, "reasoning.effort is 'some'; allowed: none, ", "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary is 'detailed'; allowed: 'auto'", "reasoning.summary"),
    ({"background": True}, "background is not supported by this server: leave it out; allowed: false", "background"),
    ({"truncation": "auto"}, 'truncation is not supported by this server: leave it out; allowed: "disabled"',
     "truncation"),
    ({"conversation": "conv_1"}, "conversation is not supported by this server", "conversation"),
    ({"prompt": {"id": "p"}}, "prompt is not supported by this server", "prompt"),
    ({"n": 2}, "n is not supported by this server: leave it out; allowed: 1", "n"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(http, engine, fields, message, param, stream):
    engine.script = "x<|user|>"
    body = {key: value for key, value in ({"input": ASK, "stream": stream} | fields).items() if value is not ...}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


def test_unknown_fields_are_ignored_and_logged_once(http, engine, caplog):
    engine.script = "</think>x<|user|>"
    for _ in range(2):
        body = {"input": "x", "a_dream": 1, "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3}
        assert http.post("/v1/responses", json=body).status_code == 200
    assert len([record for record in caplog.records if "'a_dream'" in record.getMessage()]) == 1
    assert "prompt_cache_key" not in caplog.text


def test_a_client_that_leaves_leaves_nothing_behind(scripted_server, engine):
    engine.script, engine.hangs = "</think>abc", True
    url = scripted_server[0]
    with httpx.stream("POST", url + "/v1/responses", json={"input": "x", "stream": True}, timeout=20) as answer:
        lines = answer.iter_lines()  # which closes the connection when nobody holds it any more
        data = next(line for line in lines if line.startswith("data: "))
        name = json.loads(data.removeprefix("data: "))["response"]["id"]
        assert httpx.get(f"{url}/v1/responses/{name}").json()["status"] == "in_progress"
    assert engine.left.wait(20)
    assert httpx.get(f"{url}/v1/responses/{name}").status_code == 404
