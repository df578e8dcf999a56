"""Messages and tools: brought into one form, or refused with the one thing that is wrong."""

import copy

import pytest

from glm5.chat import normalize_messages, normalize_tools
from glm5.common.errors import RequestError
from tests.support.conversations import ALL, TOOLS

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "x"]}'}}


def one(**fields):
    return normalize_messages([fields])[0]


def test_nothing_to_do_changes_nothing():
    for messages in ALL.values():
        before = copy.deepcopy(messages)
        once = normalize_messages(messages)
        assert messages == before
        assert normalize_messages(once) == once


def test_contents():
    assert one(role="user", content=None) == {"role": "user", "content": ""}
    assert one(role="assistant") == {"role": "assistant", "content": ""}
    assert one(role="system", content=["a", {"type": "text", "text": "b"}])["content"] == "ab"
    assert one(role="user", content=[])["content"] == ""
    image = {"type": "image_url", "image_url": {"url": "x"}}
    assert one(role="user", content=["a", image])["content"] == [{"type": "text", "text": "a"}, image]
    outputs = [{"output": ["a", "b"], "id": "1"}, {"output": None}]
    assert one(role="tool", content=outputs)["content"] == [{"output": "ab", "id": "1"}, {"output": ""}]
    references = [{"type": "tool_reference", "name": "f"}]
    assert one(role="tool", content=references)["content"] == references


def test_developer_is_system():
    assert one(role="developer", content="x") == {"role": "system", "content": "x"}


def test_reasoning_under_either_name():
    for name in ("reasoning", "reasoning_content"):
        assert one(role="assistant", content="a", **{name: "r"})["reasoning_content"] == "r"
    both = one(role="assistant", content="a", reasoning_content="r", reasoning="other")
    assert both == {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert "reasoning_content" not in one(role="assistant", content="a", reasoning_content=None, reasoning=None)
    assert one(role="assistant", content="a", reasoning_content="")["reasoning_content"] == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("{}", {}), ("", {}), (None, {}), (' {"é": null}\n', {"é": None})],
)
def test_arguments_become_a_mapping(arguments, expected):
    message = one(role="assistant", content=None, tool_calls=[{"function": {"name": "f", "arguments": arguments}}])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": expected}}]


def test_calls_in_either_shape():
    flat = one(role="assistant", tool_calls=[{"id": "1", "name": "f", "arguments": {"a": [1, "x"]}}, CALL])
    assert flat["tool_calls"][0] == flat["tool_calls"][1]
    assert flat["tool_calls"][1]["id"] == "1"
    assert "tool_calls" not in one(role="assistant", content="a", tool_calls=None)
    assert "tool_calls" not in one(role="assistant", content="a", tool_calls=[])


def test_other_keys_are_kept_unless_they_are_null():
    message = one(
        role="assistant", content="a", name="n", refusal=None, audio=None, function_call=None, tool_call_id="1"
    )
    assert message == {"role": "assistant", "content": "a", "name": "n", "tool_call_id": "1"}


def test_tools():
    assert normalize_tools(None) is None
    assert normalize_tools([]) is None
    assert normalize_tools(TOOLS) == TOOLS
    bare = [{"type": "function", "name": "f", "parameters": {}, "strict": True}, {"name": "g"}]
    assert normalize_tools(bare) == [
        {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}},
        {"type": "function", "function": {"name": "g"}},
    ]
    assert normalize_tools([{"function": {"name": "f"}}]) == [{"type": "function", "function": {"name": "f"}}]
    assert list(normalize_tools([{"function": {"name": "f"}, "type": "function"}])[0]) == ["function", "type"]


def assistant_with(call):
    return [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]}]


BAD_MESSAGES = [
    (None, "messages", "must be a list of at least one message, got None"),
    ([], "messages", "at least one message"),
    ({"role": "user"}, "messages", "must be a list"),
    (["hi"], "messages[0]", "must be an object with role and content, got 'hi'"),
    ([{"content": "x"}], "messages[0].role", "is None; allowed are system, user, assistant, tool"),
    ([{"role": "human", "content": "x"}], "messages[0].role", "is 'human'; allowed are"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role", "allowed are"),
    ([{"role": "user"}], "messages[0].content", "is missing; a user message needs some"),
    ([{"role": "tool", "tool_call_id": "1"}], "messages[0].content", "a tool message needs some"),
    ([{"role": "user", "content": 3}], "messages[0].content", "must be text or a list of parts, got 3"),
    ([{"role": "user", "content": {"text": "x"}}], "messages[0].content", "must be text or a list of parts"),
    ([{"role": "user", "content": [3]}], "messages[0].content[0]", "must be text or an object with a type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "must be text, got None"),
    ([{"role": "user", "content": ["a", {"type": "file"}]}], "messages[0].content[1].type",
     "is 'file'; allowed are text"),
    ([{"role": "user", "content": [{"type": "tool_reference", "name": "f"}]}], "messages[0].content[0].type",
     "is 'tool_reference'; allowed are text"),
    ([{"role": "tool", "content": [{"type": "tool_reference"}]}], "messages[0].content[0].name", "name of a function"),
    ([{"role": "tool", "content": [{"output": 3}]}], "messages[0].content[0].output", "must be text or a list"),
    ([{"role": "assistant", "content": "", "reasoning_content": ["r"]}], "messages[0].reasoning_content",
     "must be text, got ['r']"),
    ([{"role": "assistant", "content": "", "reasoning": 3}], "messages[0].reasoning", "must be text, got 3"),
    ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call", "obsolete: send tool_calls"),
    ([{"role": "user", "content": "", "tool_calls": [CALL]}], "messages[0].tool_calls",
     "in a user message: only the assistant calls tools"),
    ([{"role": "assistant", "tool_calls": CALL}], "messages[0].tool_calls", "must be a list"),
    (assistant_with("f"), "messages[1].tool_calls[0]", "must be an object with a function"),
    (assistant_with({**CALL, "type": "custom"}), "messages[1].tool_calls[0].type", "is 'custom'; only function"),
    (assistant_with({"function": "f"}), "messages[1].tool_calls[0].function", "must be an object"),
    (assistant_with({}), "messages[1].tool_calls[0].name", "must be the name of a function, got None"),
    (assistant_with({"function": {"name": " "}}), "messages[1].tool_calls[0].function.name", "got ' '"),
    (assistant_with({"function": {"name": "f", "arguments": "{a}"}}), "messages[1].tool_calls[0].function.arguments",
     "is not valid JSON"),
    (assistant_with({"function": {"name": "f", "arguments": "[1]"}}), "messages[1].tool_calls[0].function.arguments",
     "must be a JSON object, got '[1]'"),
    (assistant_with({"function": {"name": "f", "arguments": ["a"]}}), "messages[1].tool_calls[0].function.arguments",
     "must be a JSON object, got ['a']"),
    (assistant_with({"function": {"name": "f", "arguments": "[" * 10**5}}),
     "messages[1].tool_calls[0].function.arguments", "is not valid JSON"),
]  # fmt: skip
BAD_TOOLS = [
    ({"name": "f"}, "tools", "must be a list"),
    (["f"], "tools[0]", "must be an object with a function"),
    ([{"type": "web_search"}], "tools[0].type", "is 'web_search'; only function is known"),
    ([{"type": "function", "function": "f"}], "tools[0].function", "must be an object, got 'f'"),
    ([{"type": "function", "function": {}}], "tools[0].function.name", "must be the name of a function"),
    ([TOOLS[0], {"type": "function"}], "tools[1].name", "must be the name of a function"),
    ([{"name": "f", "parameters": "x"}], "tools[0].parameters", "must be a JSON schema, got 'x'"),
]


@pytest.mark.parametrize(("messages", "param", "message"), BAD_MESSAGES)
def test_bad_messages(messages, param, message):
    with pytest.raises(RequestError) as caught:
        normalize_messages(messages)
    assert caught.value.param == param
    assert param in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("tools", "param", "message"), BAD_TOOLS)
def test_bad_tools(tools, param, message):
    with pytest.raises(RequestError) as caught:
        normalize_tools(tools)
    assert caught.value.param == param
    assert message in str(caught.value)
