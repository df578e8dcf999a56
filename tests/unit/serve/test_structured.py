"""Structured output and forced calls over HTTP: whatever a random model wants to say, after whatever it thought."""

import json
import re

import httpx
import jsonschema
import pytest

from tests.support.tokenizers import tiny_tokenizer
from tests.unit.serve.asking import ASK, RequestBuilder, joined

TOKENIZER = tiny_tokenizer()
ids = TOKENIZER.encode
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "<b>yes</b>"}}


def tool(name, *, strict=False, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


COLOUR = tool("paint", colour={"enum": ["red", "blue"]}, coats={"type": "integer", "minimum": 1, "maximum": 9})
STOP = tool("stop")


@pytest.fixture(scope="module")
def http(model_server):
    with httpx.Client(base_url=model_server[0], timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def chat(http):
    """Thinks for at most five tokens."""
    return RequestBuilder(http, messages=ASK, max_tokens=300, thinking_token_budget=5, temperature=1.0)


def is_person(text):
    jsonschema.validate(json.loads(text), SCHEMA)


KINDS = {
    "response_format": ({"response_format": FORMAT}, is_person),
    "guided_json": ({"guided_json": SCHEMA}, is_person),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, is_person),
    "structured_outputs": ({"structured_outputs": {"json": SCHEMA}}, is_person),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, ["yes", "no"].index),
    "guided_regex": ({"guided_regex": "[ab]{3}x"}, lambda text: re.fullmatch("[ab]{3}x", text).group()),
    "regex": ({"regex": "[ab]{3}x"}, lambda text: re.fullmatch("[ab]{3}x", text).group()),
    "guided_grammar": ({"guided_grammar": 'root ::= "a" | "b"'}, ["a", "b"].index),
    "ebnf": ({"ebnf": 'root ::= "a" | "b"'}, ["a", "b"].index),
    "structural tag": ({"structured_outputs": {"structural_tag": TAG}}, ["<b>yes</b>"].index),
    "structural tag as format": ({"response_format": TAG}, ["<b>yes</b>"].index),
}


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_of_the_form(chat, name):
    fields, valid = KINDS[name]
    choice = chat.answer(**fields, seed=1)["choices"][0]
    assert choice["finish_reason"] == "stop"
    valid(choice["message"]["content"])
    assert choice["message"]["reasoning"]


@pytest.mark.parametrize("name", ["response_format", "guided_regex"])
def test_in_a_stream_and_without_thinking(chat, name):
    fields, valid = KINDS[name]
    (streamed,) = joined(chat.chunks(**fields, seed=1)).values()
    valid(streamed["content"])
    assert streamed["reasoning"]
    thoughtless = chat.answer(**fields, seed=2, chat_template_kwargs={"enable_thinking": False})["choices"][0]
    valid(thoughtless["message"]["content"])
    assert thoughtless["message"]["reasoning"] is None


@pytest.mark.parametrize("name", ["guided_json", "structured_outputs", "guided_choice", "ebnf"])
def test_text_completions_are_of_the_form_too(http, name):
    fields, valid = KINDS[name]
    valid(RequestBuilder(http, "/v1/completions").text(prompt="x", max_tokens=300, **fields, seed=1))


def test_any_json_object(chat):
    """A random model does not end an object by itself: its quotes and braces are made likely."""
    bias = {str(token_id): 9 for token_id in ids('"}')}
    choice = chat.answer(response_format={"type": "json_object"}, logit_bias=bias, seed=3)["choices"][0]
    assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_without_a_budget_an_answer_does_not_end_in_thought(chat):
    """End tokens are what this model likes best: none may come before the answer proper, which is never begun here."""
    bias = {str(token_id): 50 for token_id in TOKENIZER.eos_ids}
    fields = {"logit_bias": bias, "max_tokens": 12, "thinking_token_budget": None, "seed": 1}
    assert chat.answer(**fields)["usage"]["completion_tokens"] == 1
    answer = chat.answer(**fields, guided_choice=["yes"])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12


def test_schemas_that_cannot_be_enforced_are_refused_by_place(chat):
    bad = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}}
    error = chat.refusal(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": bad}})
    assert error["param"] == "response_format"
    assert error["message"].startswith("response_format.json: #/properties/a/not cannot be enforced")
    error = chat.refusal(guided_regex="(a")
    assert (error["param"], error["message"][:32]) == ("guided_regex", "guided_regex is not understood: ")
    assert chat.refusal(structured_outputs={"grammar": "root"})["param"] == "structured_outputs"


def calls_of(answer):
    (choice,) = answer["choices"]
    calls = choice["message"].get("tool_calls") or []
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def is_painted(arguments):
    jsonschema.validate(arguments, COLOUR["function"]["parameters"])


def test_a_call_is_required(chat):
    names = set()
    for name in ("paint", "stop"):
        bias = {str(ids(name)[0]): 9}
        fields = {"tools": [COLOUR, STOP], "tool_choice": "required", "parallel_tool_calls": False}
        answer = chat.answer(**fields, logit_bias=bias, seed=1)
        assert answer["choices"][0]["message"]["content"] is None
        ((name, arguments),) = calls_of(answer)
        names.add(name)
        if name == "paint":
            is_painted(arguments)
        else:
            assert arguments == {}
    assert names == {"paint", "stop"}


def test_several_calls_at_once_are_streamed_as_they_are_whole(chat):
    eager = {"logit_bias": {str(token_id): 20 for token_id in ids("<tool_call>")}}
    fields = {
        "tools": [COLOUR, STOP],
        "tool_choice": "required",
        "seed": 5,
        "max_tokens": 60,
        "thinking_token_budget": 0,
    } | eager
    answer = chat.answer(**fields)
    whole = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
    assert len(whole) > 1
    (streamed,) = joined(chat.chunks(**fields)).values()
    assert streamed["calls"] == [[call["name"], call["arguments"]] for call in whole]


@pytest.mark.parametrize(
    "choice",
    [{"type": "function", "function": {"name": "paint"}},
     {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [COLOUR]}}],
    ids=["named", "allowed"],
)  # fmt: skip
def test_a_certain_call(chat, choice):
    for seed in range(2):
        fields = {"parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": seed > 0}}
        answer = chat.answer(tools=[STOP, COLOUR], tool_choice=choice, seed=seed, **fields)
        ((name, arguments),) = calls_of(answer)
        assert name == "paint"
        is_painted(arguments)


def test_strict_tools_and_one_call_at_most(chat):
    """Text or calls as the model likes; it likes calls, and to end after one."""
    eager = {str(token_id): 20 for token_id in ids("<tool_call>")} | {str(ids("<|user|>")[0]): 6}
    strict = {**COLOUR, "function": {**COLOUR["function"], "strict": True}}
    fields = {"tools": [strict], "logit_bias": eager, "max_tokens": 70, "thinking_token_budget": 0}
    answer = chat.answer(**fields, seed=1)
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert len(calls) > 1
    for call in calls[:-1]:
        is_painted(json.loads(call["function"]["arguments"]))
    answer = chat.answer(**fields, seed=1, parallel_tool_calls=False)
    ((_, arguments),) = calls_of(answer)
    is_painted(arguments)


def test_an_answer_of_a_form_or_calls(chat):
    """A bias for the first character of one or the other decides which; either is whole and valid."""
    strict = {**COLOUR, "function": {**COLOUR["function"], "strict": True}}
    fields = {"tools": [strict], "response_format": FORMAT, "parallel_tool_calls": False, "thinking_token_budget": 0}
    answer = chat.answer(**fields, logit_bias={str(ids("<tool_call>")[0]): 50})
    ((_, arguments),) = calls_of(answer)
    is_painted(arguments)
    answer = chat.answer(**fields, logit_bias={str(ids("{")[0]): 50})
    assert calls_of(answer) == []
    is_person(answer["choices"][0]["message"]["content"])


def test_fixed_whitespace_beside_tools_is_refused(chat):
    wanted = {"json": SCHEMA, "disable_any_whitespace": True}
    error = chat.refusal(tools=[COLOUR], structured_outputs=wanted)
    assert error["param"] == "structured_outputs"
    assert "beside tools" in error["message"]
    assert json.loads(chat.answer(structured_outputs=wanted)["choices"][0]["message"]["content"])


def test_strict_tools_that_cannot_be_enforced(chat):
    odd = tool("f", strict=True, a={"type": "integer", "not": {"const": 1}})
    error = chat.refusal(tools=[odd])
    assert error["param"] == "tools"
    assert "the parameters of 'f' cannot be enforced" in error["message"]
    assert chat.answer(tools=[{**odd, "function": {**odd["function"], "strict": False}}], max_tokens=2)
