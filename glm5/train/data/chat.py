"""Conversations to token ids of which those are marked that the model said: rows for supervised fine-tuning.

A row is an object with `messages` (OpenAI's shape; an assistant message with `"loss": false`, an error that must not be
learnt, stays in the context only), `tools` and `thinking`, or with `token_ids` and `loss_mask`. `thinking`:

    interleaved   the default: reasoning before every answer and tool call; later turns do not see that of earlier ones
    preserved     all reasoning stays
    off           none

Within these a turn whose messages have no reasoning is one with thinking switched off (turn-level thinking), unless the
template writes it otherwise. What the model said is what the template renders behind the generation prompt that it
would have been asked with, up to and with the token that hands over. Where the next turn renders an earlier one
differently, as interleaved thinking does, both are examples, each learnt from what it had to go by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from glm5.chat.guard import Guard
from glm5.chat.message import normalize_messages
from glm5.chat.template import ChatTemplate
from glm5.common.errors import DataError, RequestError

THINKING = ("interleaved", "preserved", "off")
_ROW = ("messages", "tools", "thinking", "reasoning_effort", "token_ids", "loss_mask")
_MESSAGE = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "loss")


@dataclass(frozen=True)
class Example:
    """Token ids, and for each whether the model is to learn to produce it."""

    ids: list[int]
    marks: list[bool]


@dataclass
class _Text:
    """A rendered conversation with a guard's marks, and (start, stop) of what the model said in it, last first."""

    text: str
    spans: list[tuple[int, int]] = field(default_factory=list)


def examples_of(row: Any, template: ChatTemplate, where: str) -> list[Example]:
    """What a row teaches; empty where nothing in it is to be learnt. Raises `DataError` that begins with `where`."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a row is an object, got {type(row).__name__}")
    if ("messages" in row) == ("token_ids" in row):
        raise DataError(f"{where}: a row has either messages or token_ids, got {', '.join(map(str, row)) or 'nothing'}")
    _no_slips(row, _ROW, where)
    if "token_ids" in row:
        return _from_ids(row, where)
    try:
        return _from_messages(row, template, where)
    except RequestError as error:
        raise DataError(f"{where}: {error}") from None


def _no_slips(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Other keys are a data set's own; one that is nearly a key known here would be overlooked."""
    for key in given.keys() - set(known):
        if near := get_close_matches(str(key).lower(), known, n=1, cutoff=0.8):
            raise DataError(f"{where}: got the key {key!r:.40}; the nearest that means something is {near[0]!r}")


def _from_ids(row: Mapping[str, Any], where: str) -> list[Example]:
    ids, mask = row["token_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or any(type(token_id) is not int for token_id in ids):
        raise DataError(f"{where}: token_ids must be a list of integers")
    if not isinstance(mask, list) or len(mask) != len(ids) or any(mark not in (0, 1) for mark in mask):
        raise DataError(f"{where}: loss_mask must be a list of 0 and 1, one for each of the {len(ids)} token_ids")
    return [Example(ids, [bool(mark) for mark in mask])] if any(mask) else []


def _from_messages(row: Mapping[str, Any], template: ChatTemplate, where: str) -> list[Example]:
    thinking = row.get("thinking", "interleaved")
    if thinking not in THINKING:
        raise DataError(f"{where}: thinking: got {thinking!r:.60}; allowed: {', '.join(THINKING)}")
    if not isinstance(row["messages"], list) or not row["messages"]:
        raise DataError(f"{where}: messages must be a list of at least one message")
    messages, learnt = _without_flags(row["messages"], where)
    normalize_messages(messages)  # also where nothing is learnt, and so nothing rendered: a slip in a role is an error
    if not template.allow_control_tokens:
        _no_reasoning_in_contents(messages, where)
    guard = template.guard()
    rendered: list[_Text] = []
    for i in reversed(range(len(messages))):
        if learnt[i]:
            _add(rendered, *_said(messages[: i + 1], row, thinking, template, guard, where))
    return [_encoded(text, guard) for text in reversed(rendered)]


def _no_reasoning_in_contents(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """It would be learnt as text that spells tags."""
    for i, message in enumerate(messages):
        content = message.get("content")
        embeds = isinstance(content, str) and content.lstrip().startswith("<think>")
        if message.get("role") == "assistant" and embeds and not message.get("reasoning_content"):
            raise DataError(
                f"{where}: messages[{i}].content begins with <think>, which is text there; put reasoning under "
                "reasoning_content, or tokenize with --allow-control-tokens-in-messages"
            )


def _without_flags(given: Sequence[Any], where: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """The messages as templates take them, and which are learnt: by default, all of the assistant's."""
    messages: list[dict[str, Any]] = []
    learnt: list[bool] = []
    for i, message in enumerate(given):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: messages[{i}] must be an object, got {type(message).__name__}")
        _no_slips(message, _MESSAGE, f"{where}: messages[{i}]")
        spoken = message.get("role") == "assistant"
        loss = message.get("loss", spoken)
        if loss not in (False, True) or (loss and not spoken):
            raise DataError(
                f"{where}: messages[{i}].loss: got {loss!r:.40}; allowed: true or false, of assistants only"
            )
        messages.append({key: value for key, value in message.items() if key != "loss"})
        learnt.append(bool(loss))
    return messages, learnt


def _said(
    messages: list[dict[str, Any]],
    row: Mapping[str, Any],
    thinking: str,
    template: ChatTemplate,
    guard: Guard,
    where: str,
) -> tuple[str, int, str]:
    """(the conversation up to the last message, where what the model said begins, the token that hands over)."""
    options = {key: row[key] for key in ("reasoning_effort",) if key in row}
    options |= {"clear_thinking": False} if thinking == "preserved" else {}
    last = messages[-1]
    if thinking == "off":
        if last.get("reasoning_content"):
            raise DataError(f"{where}: messages[{len(messages) - 1}] has reasoning_content, and thinking is off")
        modes = [False]
    else:
        begin = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        thinks = any(message.get("reasoning_content") for message in messages[begin + 1 :])
        modes = [thinks, not thinks]
    tools = row.get("tools")
    for mode in modes:
        if mode is False and template.always_thinks:
            continue
        switch = {} if template.always_thinks else {"enable_thinking": mode}
        done = template.render_marked(guard, messages, tools, add_generation_prompt=False, **options, **switch)
        prompt = template.render_marked(guard, messages[:-1], tools, add_generation_prompt=True, **options, **switch)
        if done.startswith(prompt):
            return done, len(prompt), "<|observation|>" if last.get("tool_calls") else "<|user|>"
    raise DataError(
        f"{where}: messages[{len(messages) - 1}]: the chat template {template.name} does not render it behind "
        "its generation prompt"
    )


def _add(rendered: list[_Text], done: str, start: int, handover: str) -> None:
    """What was said goes into the conversation that goes on from it word for word, or is one of its own."""
    stop = len(done) + len(handover)
    if not rendered or not rendered[-1].text.startswith(done + handover):
        rendered.append(_Text(done + handover))
    rendered[-1].spans.append((start, stop))


def _encoded(rendered: _Text, guard: Guard) -> Example:
    """Piece by piece: pieces begin and end at special tokens, over which no token reaches."""
    ids: list[int] = []
    marks: list[bool] = []
    at = 0
    for start, stop in reversed(rendered.spans):
        for text, mark in ((rendered.text[at:start], False), (rendered.text[start:stop], True)):
            piece = guard.encode(text)
            ids += piece
            marks += [mark] * len(piece)
        at = stop
    return Example(ids, marks)
