"""Converts Anthropic's messages, content blocks and tools to OpenAI's format, which chat templates expect.

    user        text -> a user message; tool_result -> a tool message; in the order of the blocks
    assistant   thinking -> reasoning, text -> content, tool_use -> tool_calls; one message
    system      the field `system` -> the first message; messages of this role stay in their place

Invalid input raises a RequestError whose `param` is the path of the field.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from glm5.chat.message import Message, Tool
from glm5.common.errors import RequestError
from glm5.serve.generation.encrypted_reasoning import decrypt

_TEXT_ONLY = "the model reads text alone"
_ROLES = ("user", "assistant", "system")


def messages_of(messages: list[Any], system: Any) -> list[Message]:
    """The messages of a conversation; the system prompt comes first."""
    found: list[Message] = []
    if system is not None:
        found.append({"role": "system", "content": _text(system, "system")})
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise RequestError(f"{where}.role is {role!r:.60}; allowed: {', '.join(_ROLES)}", f"{where}.role")
        content, where = message.get("content"), f"{where}.content"
        match message["role"]:
            case "user":
                found += _of_user(content, where)
            case "assistant":
                found.append(_of_assistant(content, where))
            case _:
                found.append({"role": "system", "content": _text(content, where)})
    return found


def tools_of(tools: list[Any]) -> list[Tool]:
    """Tools that the client runs. Tools that Anthropic's service runs or defines are refused by name."""
    return [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def _of_user(content: Any, where: str) -> Iterator[Message]:
    """Consecutive text blocks become one user message, each tool_result a tool message."""
    texts: list[str] = []
    for place, block in _blocks(content, where):
        match block["type"]:
            case "text":
                texts.append(_text_of(block, place))
            case "tool_result":
                if texts:
                    yield {"role": "user", "content": "\n".join(texts)}
                    texts = []
                yield _result(block, place)
            case _:
                raise _refusal(block, place, "text, tool_result")
    if texts or not content:
        yield {"role": "user", "content": "\n".join(texts)}


def _of_assistant(content: Any, where: str) -> Message:
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in _blocks(content, where):
        match block["type"]:
            case "text":
                texts.append(_text_of(block, place))
            case "thinking":
                thinking, signature = block.get("thinking"), block.get("signature") or ""
                if not isinstance(thinking, str) or not isinstance(signature, str):
                    raise RequestError(f"{place}.thinking is {thinking!r:.60}; allowed: a text", f"{place}.thinking")
                reasoning.append(thinking or decrypt(signature) or "")
            case "redacted_thinking":
                pass  # encrypted by Anthropic's service
            case "tool_use":
                calls.append(_call(block, place))
            case _:
                raise _refusal(block, place, "text, thinking, redacted_thinking, tool_use")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thought := "".join(reasoning):
        message["reasoning_content"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments, name = block.get("input"), block.get("name")
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.input is {arguments!r:.60}; allowed: an object", f"{where}.input")
    if not isinstance(name, str) or not name.strip():
        raise RequestError(f"{where}.name is {name!r:.60}; allowed: the name of a tool", f"{where}.name")
    return {"id": _id(block, "id", where), "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: Mapping[str, Any], where: str) -> Message:
    content, inner = block.get("content"), f"{where}.content"
    parts: list[Any] = []
    for place, part in _blocks("" if content is None else content, inner):
        match part["type"]:
            case "text":
                parts.append({"type": "text", "text": _text_of(part, place)})
            case "tool_reference":
                parts.append({"type": "tool_reference", "name": part.get("tool_name")})
            case _:
                raise _refusal(part, place, "text, tool_reference")
    shown: Any = parts
    if all(part["type"] == "text" for part in parts):
        shown = "\n".join(part["text"] for part in parts)
        if block.get("is_error"):
            shown = f"Error: {shown}"
    return {"role": "tool", "tool_call_id": _id(block, "tool_use_id", where), "content": shown}


def _text(content: Any, where: str) -> str:
    """The text of content that may contain only text."""
    texts: list[str] = []
    for place, block in _blocks(content, where):
        if block["type"] != "text":
            raise _refusal(block, place, "text")
        texts.append(_text_of(block, place))
    return "\n".join(texts)


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The content blocks with their paths; a plain text is one text block."""
    if isinstance(content, str):
        if content:
            yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        got = "missing" if content is None else f"{content!r:.60}"
        raise RequestError(f"{where} is {got}; allowed: a text, or a list of blocks", where)
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise RequestError(f"{place} is {block!r:.60}; allowed: an object with a type", place)
        yield place, block


def _text_of(block: Mapping[str, Any], where: str) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text is {text!r:.60}; allowed: a text", f"{where}.text")
    return text


def _id(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{where}.{name} is {value!r:.60}; allowed: the id of a tool_use", f"{where}.{name}")
    return value


def _refusal(block: Mapping[str, Any], where: str, allowed: str) -> RequestError:
    message = f"{where}.type is {block['type']!r:.60}, which is not supported here: {_TEXT_ONLY}; allowed: {allowed}"
    return RequestError(message, where)


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} is {tool!r:.60}; allowed: an object with name and input_schema", where)
    if (kind := tool.get("type")) not in (None, "custom"):
        known = "custom, a tool that the client describes and runs"
        raise RequestError(f"{where}.type is {kind!r:.60}; allowed: {known}", f"{where}.type")
    if tool.get("allowed_callers", ["direct"]) != ["direct"]:
        callers = tool["allowed_callers"]
        raise RequestError(
            f'{where}.allowed_callers is {callers!r:.60}; allowed: ["direct"]', f"{where}.allowed_callers"
        )
    if not isinstance(name := tool.get("name"), str) or not name.strip():
        raise RequestError(f"{where}.name is {name!r:.60}; allowed: the name of a tool", f"{where}.name")
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where}.input_schema is {schema!r:.60}; allowed: a JSON schema", f"{where}.input_schema")
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    function["parameters"] = schema
    function |= {name: tool[name] for name in ("input_examples", "strict", "defer_loading") if tool.get(name)}
    return {"type": "function", "function": function}
