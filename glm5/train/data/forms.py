"""Published forms of rows -> the rows that chat.py and pairs.py read. A row's keys tell its form.

    {"conversations": [{"from": "human", "value": ...}, ...], "system": ..., "tools": ...}      ShareGPT
    {"prompt": text or messages, "completion": text or messages}            what the completion says is learnt
    {"input": {"messages": ..., "tools": ...}, "preferred_output": messages, "non_preferred_output": messages}
                                                                            OpenAI's preferences
    {"conversations": ..., "chosen": {"from": ..., "value": ...}, "rejected": ...}              ShareGPT's

A list of messages may be in ShareGPT's keys wherever one is read. A key whose value is null counts as absent, and
`tools` may be a text of JSON: tables have one type a column.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from glm5.common.errors import DataError

Kind = Literal["a text", "a conversation", "a pair"]

OPTIONS = ("tools", "thinking", "reasoning_effort")
"""Keys of a row of any form."""
CONVERSATION_KEYS = ("messages", "token_ids", "loss_mask", *OPTIONS)
PAIR_KEYS = ("prompt", "chosen", "rejected", *OPTIONS)
_PREFERENCES = ("input", "preferred_output", "non_preferred_output")
COLUMNS = tuple(
    dict.fromkeys((*CONVERSATION_KEYS, *PAIR_KEYS, *_PREFERENCES, "conversations", "system", "completion", "label"))
)
"""All keys of a row that mean something, besides that of a text."""
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
    "system": "system",
}


def kind_of_row(row: Any) -> Kind:
    """What a row is meant as. Published pairs may also have messages, and conversations a text."""
    if not isinstance(row, Mapping):
        return "a text"
    there = {key for key, value in row.items() if value is not None}
    if is_pair(row):
        return "a pair"
    is_conversation = there & {"messages", "token_ids", "conversations"} or there >= {"prompt", "completion"}
    return "a conversation" if is_conversation else "a text"


def is_pair(row: Mapping[str, Any]) -> bool:
    """Whether a row is meant as two answers of which one is better."""
    answers = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
    return any(all(row.get(key) is not None for key in keys) for keys in answers)


def conversation_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A conversation with `messages`, or with `token_ids` and `loss_mask`. Raises `DataError` that begins with `where`
    for a form that is none."""
    row = _read(row, where)
    own = [key for key in ("messages", "token_ids") if key in row]
    if not own and "conversations" in row:
        return _of_sharegpt(row, where)
    if not own and "prompt" in row and "completion" in row:
        return _of_completion(row, where)
    if len(own) != 1:
        raise DataError(f"{where}: a row has either messages or token_ids, got {', '.join(map(str, row)) or 'nothing'}")
    return row | ({"messages": as_messages(row["messages"], where)} if "messages" in row else {})


def pair_row_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A pair with `prompt`, `chosen` and `rejected`, or without `prompt`. Raises `DataError`."""
    row = _read(row, where)
    if "chosen" not in row:
        asked = row.pop("input", None)
        if not isinstance(asked, Mapping) or not isinstance(asked.get("messages"), list):
            raise DataError(f"{where}: input: got {asked!r:.40}; allowed: an object with a list of messages")
        row |= {"prompt": asked["messages"], "chosen": row.pop("preferred_output")}
        row |= {"rejected": row.pop("non_preferred_output")}
        row |= _read({"tools": asked.get("tools")}, where)
    if "prompt" not in row and "conversations" in row:
        row["prompt"] = _of_sharegpt(row, where)["messages"]
    return row


def as_messages(given: Any, where: str) -> Any:
    """A list of messages in which those in ShareGPT's keys are in OpenAI's; anything else as it is."""
    if not isinstance(given, list):
        return given
    return [_turn(one, f"{where}: message {i}") if _is_turn(one) else one for i, one in enumerate(given)]


def _read(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Without nulls, and with tools as a list."""
    row = {key: value for key, value in row.items() if value is not None}
    if isinstance(row.get("tools"), str):
        text = row.pop("tools").strip()
        row |= {"tools": _parsed(text, "tools", where)} if text else {}
    return row


def _of_sharegpt(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: conversations must be a list of at least one turn, got {turns!r:.40}")
    messages = as_messages(turns, where)
    if row.get("system"):
        messages = [{"role": "system", "content": row["system"]}, *messages]
    rest = {key: value for key, value in row.items() if key not in ("conversations", "system")}
    return {"messages": messages, **rest}


def _of_completion(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The prompt's messages are context, whoever wrote them."""
    if isinstance(row.get("label"), bool):
        raise DataError(
            f"{where}: prompt, completion and label are a judgement of one answer (KTO), which no kind of stage learns "
            "from; give good answers without label to sft, or pairs with chosen and rejected to reward or dpo"
        )
    prompt, completion = (said_by(role, row[key], f"{where}: {key}") for role, key in _COMPLETION)
    if completion[0].get("role") != "assistant":
        raise DataError(f"{where}: completion begins with role {completion[0].get('role')!r:.40}; allowed: assistant")
    context = [{key: value for key, value in one.items() if key not in ("loss", "weight")} for one in prompt]
    rest = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
    return {"messages": [*({**one, "loss": False} for one in context), *completion], **rest}


_COMPLETION = (("user", "prompt"), ("assistant", "completion"))


def said_by(role: str, given: Any, where: str) -> list[dict[str, Any]]:
    """The messages of a list, of one message, or of a text that `role` says. Raises `DataError`."""
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    listed = [given] if isinstance(given, Mapping) else given
    if not isinstance(listed, list) or not listed or not all(isinstance(one, Mapping) for one in listed):
        raise DataError(f"{where}: got {given!r:.40}; allowed: a text, or a list of at least one message")
    return [dict(one) for one in as_messages(listed, where)]


def _is_turn(given: Any) -> bool:
    return isinstance(given, Mapping) and "role" not in given and "from" in given and "value" in given


def _turn(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A turn of ShareGPT as a message."""
    speaker, value = given["from"], given["value"]
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise DataError(f"{where}: from: got {speaker!r:.40}; allowed: {', '.join(_ROLES)}")
    if not isinstance(value, str):
        raise DataError(f"{where}: value: got {value!r:.40}; allowed: a text")
    rest = {key: one for key, one in given.items() if key not in ("from", "value") and one is not None}
    if speaker != "function_call":
        return {"role": _ROLES[speaker], "content": value, **rest}
    calls = _parsed(value, "value of function_call", where)
    functions = [{"type": "function", "function": one} for one in (calls if isinstance(calls, list) else [calls])]
    return {"role": "assistant", "content": "", "tool_calls": functions, **rest}


def _parsed(text: str, name: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {name}: not JSON: {error}") from None
