"""Validates messages and tools in OpenAI's format, and normalizes them for chat templates.

    role        system, user, assistant or tool; developer is read as system
    content     text, or parts; None is "" and parts that are all text are joined
    reasoning   under `reasoning_content`, also accepted as `reasoning`
    tool_calls  {"id", "type", "function": {"name", "arguments"}} with arguments as a mapping
    tools       {"type": "function", "function": {"name", ...}}; a bare function is wrapped

Normalizing twice changes nothing. Invalid input raises a RequestError whose `param` is the path of the field.
"""

import json
from collections.abc import Mapping
from typing import Any

from glm5.common.errors import RequestError

Message = dict[str, Any]
Tool = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
MEDIA_PARTS = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")


def normalize_messages(messages: Any) -> list[Message]:
    """Normalized copies of messages. Unknown keys are kept."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a list of at least one message, got {_shown(messages)}", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def normalize_tools(tools: Any) -> list[Tool] | None:
    """Normalized tools, or None if there are none."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise RequestError(f"tools must be a list, got {_shown(tools)}", "tools")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {_shown(message)}", where)
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {_shown(role)}; allowed are {', '.join(ROLES)} (and developer, read as system)",
            f"{where}.role",
        )
    if role != "assistant" and "content" not in message:
        raise RequestError(f"{where}.content is missing; a {role} message needs some", f"{where}.content")
    known = {"role", "content", "reasoning", "reasoning_content", "tool_calls", "function_call"}
    result: Message = {"role": role, "content": _content(message.get("content"), f"{where}.content", role)}
    if role == "assistant":
        result |= _assistant_fields(message, where)
    elif message.get("tool_calls"):
        raise RequestError(
            f"{where}.tool_calls in a {role} message: only the assistant calls tools", f"{where}.tool_calls"
        )
    return result | {key: value for key, value in message.items() if key not in known and value is not None}


def _assistant_fields(message: Mapping[str, Any], where: str) -> Message:
    fields: Message = {}
    name = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
    if (reasoning := message.get(name)) is not None:
        if not isinstance(reasoning, str):
            raise RequestError(f"{where}.{name} must be text, got {_shown(reasoning)}", f"{where}.{name}")
        fields["reasoning_content"] = reasoning
    if message.get("function_call") is not None:
        raise RequestError(f"{where}.function_call is obsolete: send tool_calls", f"{where}.function_call")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list, got {_shown(calls)}", f"{where}.tool_calls")
    if calls:
        fields["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return fields


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError(f"{where} must be an object with a function, got {_shown(call)}", where)
    if call.get("type", "function") != "function":
        raise RequestError(f"{where}.type is {_shown(call['type'])}; only function is known", f"{where}.type")
    inner = call.get("function")
    if inner is not None and not isinstance(inner, Mapping):
        raise RequestError(f"{where}.function must be an object, got {_shown(inner)}", f"{where}.function")
    function, path = (inner, f"{where}.function") if inner else (call, where)
    name = _function_name(function, path)
    arguments = _arguments(function.get("arguments"), f"{path}.arguments")
    result = {key: call[key] for key in ("id", "tool_call_id") if call.get(key)}
    return result | {"type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Arguments as a mapping, from a mapping or its JSON text. None and "" mean no arguments."""
    if arguments is None or arguments == "":
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not valid JSON ({error}): {_shown(arguments)}", where) from error
    if not isinstance(parsed, Mapping):
        raise RequestError(f"{where} must be a JSON object, got {_shown(arguments)}", where)
    return dict(parsed)


def _content(content: Any, where: str, role: str) -> str | list[Any]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of parts, got {_shown(content)}", where)
    parts = [_part(part, f"{where}[{i}]", role) for i, part in enumerate(content)]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: Any, where: str, role: str) -> str | dict[str, Any]:
    """A content part: the text of a text part, otherwise the part itself."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be text or an object with a type, got {_shown(part)}", where)
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.text must be text, got {_shown(part.get('text'))}", f"{where}.text")
        return part["text"]
    if role == "tool" and "output" in part:
        return {**part, "output": _content(part["output"], f"{where}.output", role)}
    if role == "tool" and kind == "tool_reference":
        _function_name(part, where)
        return dict(part)
    if kind in MEDIA_PARTS:
        return dict(part)
    allowed = ["text", *MEDIA_PARTS, *(["tool_reference", "output"] if role == "tool" else [])]
    raise RequestError(f"{where}.type is {_shown(kind)}; allowed are {', '.join(allowed)}", f"{where}.type")


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object with a function, got {_shown(tool)}", where)
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}.type is {_shown(tool['type'])}; only function is known", f"{where}.type")
    bare = "function" not in tool
    function = {key: value for key, value in tool.items() if key != "type"} if bare else tool["function"]
    path = where if bare else f"{where}.function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{path} must be an object, got {_shown(function)}", path)
    _function_name(function, path)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{path}.parameters must be a JSON schema, got {_shown(parameters)}", f"{path}.parameters")
    if bare:
        return {"type": "function", "function": function}
    return dict(tool) if "type" in tool else {"type": "function", **tool}


def _function_name(holder: Mapping[str, Any], where: str) -> str:
    name = holder.get("name")
    if not isinstance(name, str) or not name.strip():
        raise RequestError(f"{where}.name must be the name of a function, got {_shown(name)}", f"{where}.name")
    return name


def _shown(value: Any) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
