"""Conversations that touch every rule of the chat templates."""

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "description": "Wetter <für> 北京 & co",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["北京", None, 1.5]}}},
        },
    },
    {"type": "function", "function": {"name": "rare", "defer_loading": True, "description": "loaded on demand"}},
]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any = "", thought: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = list(calls)
    return message


def called(name: str, call_id: str | None = None, /, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def result(text: Any, call_id: str | None = None) -> dict[str, Any]:
    message = {"role": "tool", "content": text}
    return message if call_id is None else {**message, "tool_call_id": call_id}


SYSTEM = {"role": "system", "content": "S"}
TWO_TURNS = [user("u1"), assistant("a1", "r1"), user("u2")]
NO_REASONING = [user("u1"), assistant(" a1 \n"), user("u2"), assistant("a2")]
TOOL_LOOP = [
    SYSTEM,
    user("u1"),
    assistant("a1", "r1"),
    user("u2"),
    assistant("", "r2", called("get_weather", "A", city="北京", n=3, ok=True), called("get_weather", "B")),
    result("rb", "B"),
    result("ra", "A"),
]
MIXED_TURN = [
    user("u1"),
    assistant("call", "r", called("get_weather", "A", city="x")),
    result("done", "A"),
    assistant("final"),
    user("u2"),
]
EMBEDDED = [user("u1"), assistant("<think>\nr1\n</think>\n\na1"), user("u2"), assistant("x</think> y</think>z ")]
PARTS = [
    {"role": "system", "content": ["S", {"type": "text", "text": "1"}]},
    user([{"type": "text", "text": "a"}, "b", {"type": "text", "text": ""}]),
    assistant([{"type": "text", "text": " c "}]),
    user(""),
]
UNUSUAL_ARGUMENTS = [
    user("u"),
    assistant("", "", called("f", "1", s=" <&> ", i=0, f=1.5, n=None, b=False, o={"k": ["é", {}]}, l=[])),
    result("", "1"),
]
SYSTEM_LATER = [user("u1"), SYSTEM, assistant("a1", "r1"), {"role": "system", "content": "T"}, user("u2")]
TOOL_FIRST = [result("r0"), user("u1")]
REFERENCES = [
    user("u"),
    assistant("", "r", called("search", "1")),
    result([{"type": "tool_reference", "name": "rare"}], "1"),
]
OUTPUTS = [
    user("u"),
    assistant("", "r", called("f", "1"), called("f", "2")),
    result([{"output": "two", "tool_call_id": "2"}, {"output": "one", "tool_call_id": "1"}]),
]

ALL: dict[str, list[dict[str, Any]]] = {
    "hello": [user("Hello")],
    "system": [SYSTEM, user("Hello")],
    "two turns": TWO_TURNS,
    "no reasoning": NO_REASONING,
    "tool loop": TOOL_LOOP,
    "mixed turn": MIXED_TURN,
    "embedded": EMBEDDED,
    "parts": PARTS,
    "unusual arguments": UNUSUAL_ARGUMENTS,
    "system later": SYSTEM_LATER,
    "tool first": TOOL_FIRST,
    "references": REFERENCES,
}

KWARGS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"clear_thinking": False},
    {"clear_thinking": True, "enable_thinking": True},
    {"clear_thinking": False, "enable_thinking": False},
    {"reasoning_effort": "high"},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "medium"},
]
