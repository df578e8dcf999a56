"""Converts OpenAI's items of a conversation to messages, which chat templates expect.

    message                        -> a message of the user, the system, a developer, or the assistant
    reasoning, function_call       -> parts of one assistant message, with its text
    function_call_output           -> a tool message
    item_reference                 replaced by the item of a stored response

Invalid input raises a RequestError whose `param` is the path of the field.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from glm5.chat.message import Message
from glm5.common.errors import RequestError
from glm5.serve.generation.encrypted_reasoning import decrypt
from glm5.serve.responses.tools import name_in_prompt
from glm5.serve.service.response_store import Item

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_REFERENCE = "item_reference"
_KINDS = (*_ID_PREFIXES, _REFERENCE)


def references_of(given: Any) -> set[str]:
    """The ids of the items of stored responses that the input refers to."""
    items = given if isinstance(given, list) else ()
    found = [item.get("id") for item in items if isinstance(item, Mapping) and _kind(item) == _REFERENCE]
    return {name for name in found if isinstance(name, str)}


def items_of(given: Any, known: Mapping[str, Item]) -> list[Item]:
    """The input as items with ids; references are replaced by items from `known`. Raises RequestError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list) or not given:
        raise RequestError(f"input is {given!r:.60}; allowed: a text, or a list of at least one item", "input")
    return [_item(item, f"input[{number}]", known) for number, item in enumerate(given)]


def new_id(kind: str) -> str:
    """A new id for an item."""
    return f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


def messages_of(before: Sequence[Item], items: Sequence[Item], instructions: str | None) -> list[Message]:
    """The messages of a conversation: instructions, then the items `before` the input, then the input's. Raises
    RequestError."""
    found: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    turn: Message | None = None  # the assistant's current message
    for number, item in enumerate((*before, *items), start=-len(before)):
        where, kind = f"input[{number}]", item["type"]
        if kind == "function_call_output" or (kind == "message" and item["role"] != "assistant"):
            turn = None
            found.append(_other(item, where))
            continue
        if turn is None or _begins(kind, turn):
            turn = {"role": "assistant", "content": ""}
            found.append(turn)
        match kind:
            case "message":
                turn["content"] += _text(item.get("content"), f"{where}.content")
            case "reasoning":
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning(item, where)
            case _:
                turn.setdefault("tool_calls", []).append(_call(item, where))
    return found


def _begins(kind: str, turn: Message) -> bool:
    """Whether an item begins another assistant message: reasoning does after text, and text after calls."""
    has_calls = "tool_calls" in turn
    return (kind == "reasoning" and bool(turn["content"] or has_calls)) or (kind == "message" and has_calls)


def _kind(item: Item) -> Any:
    return item.get("type") or ("message" if "role" in item else _REFERENCE if "id" in item else None)


def _item(item: Any, where: str, known: Mapping[str, Item]) -> Item:
    if not isinstance(item, Mapping):
        raise RequestError(f"{where} is {item!r:.60}; allowed: an object", where)
    kind = _kind(item)
    if kind not in _KINDS:
        got = f"{where}.type is {kind!r:.60}, which is not supported here"
        raise RequestError(f"{got}; allowed: {', '.join(_KINDS)}", f"{where}.type")
    name = item.get("id")
    if kind == _REFERENCE:
        if not isinstance(name, str) or name not in known:
            raise RequestError(f"{where}.id is {name!r:.80}, which no stored response has", f"{where}.id")
        return known[name]
    if kind == "message" and item.get("role") not in _ROLES:
        raise RequestError(f"{where}.role is {item.get('role')!r:.60}; allowed: {', '.join(_ROLES)}", f"{where}.role")
    return {**item, "type": kind, "id": name if isinstance(name, str) and name else new_id(kind)}


def _other(item: Item, where: str) -> Message:
    if item["type"] == "message":
        return {"role": item["role"], "content": _text(item.get("content"), f"{where}.content")}
    output = _text(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": _call_id(item, where), "content": output}


def _call(item: Item, where: str) -> dict[str, Any]:
    name = item.get("name")
    if not isinstance(name, str) or not name.strip():
        raise RequestError(f"{where}.name is {name!r:.60}; allowed: the name of a function", f"{where}.name")
    function = {
        "name": name_in_prompt(item.get("namespace"), name),
        "arguments": _arguments(item, f"{where}.arguments"),
    }
    return {"id": _call_id(item, where), "type": "function", "function": function}


def _arguments(item: Item, where: str) -> Mapping[str, Any]:
    text, parsed = item.get("arguments"), None
    if isinstance(text, str):
        try:
            parsed = json.loads(text or "{}")
        except (ValueError, RecursionError):
            parsed = {} if item.get("status") == "incomplete" else None  # the end of its response cut it off
    if not isinstance(parsed, Mapping):
        raise RequestError(f"{where} is {text!r:.60}; allowed: the JSON text of an object", where)
    return parsed


def _call_id(item: Item, where: str) -> str:
    value = item.get("call_id")
    if not isinstance(value, str) or not value:
        raise RequestError(f"{where}.call_id is {value!r:.60}; allowed: the id of a call", f"{where}.call_id")
    return value


def _reasoning(item: Item, where: str) -> str:
    """The text of reasoning: its content, else the encrypted content, else the summary (from another model)."""
    if content := _parts(item.get("content"), "reasoning_text", f"{where}.content"):
        return content
    encrypted = item.get("encrypted_content")
    if isinstance(encrypted, str) and (text := decrypt(encrypted)):
        return text
    return _parts(item.get("summary"), "summary_text", f"{where}.summary")


def _parts(parts: Any, kind: str, where: str) -> str:
    texts: list[str] = []
    for number, part in enumerate([] if parts is None else parts if isinstance(parts, list) else [parts]):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            place = f"{where}[{number}]"
            raise RequestError(f"{place} is {part!r:.60}; allowed: a {kind}", place)
        texts.append(text)
    return "\n".join(texts)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} is {content!r:.60}; allowed: a text, or a list of parts", where)
    texts: list[str] = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            known = "input_text, output_text, refusal"
            got = f"{place}.type is {kind!r:.60}, which is not supported here: the model reads text alone"
            raise RequestError(f"{got}; allowed: {known}", place)
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise RequestError(f"{place}.{_TEXT_PARTS[kind]} is {text!r:.60}; allowed: a text", place)
        texts.append(text)
    return "\n".join(texts)
