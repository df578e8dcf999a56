"""Conversations -> token ids and loss masks for supervised fine-tuning.

A row is an object with `messages` (OpenAI's format), `tools` and `thinking`, with `token_ids` and `loss_mask`, or of
another form in forms.py. An assistant message with `"weight": 0` (OpenAI's) or `"loss": false` is context only.
`thinking`:

    interleaved   the default: reasoning before every answer and tool call; it is not shown in later turns
    preserved     all reasoning is kept
    off           no reasoning

A turn whose messages have no reasoning has thinking switched off (turn-level thinking), unless the template always
thinks. The loss covers what the template renders after the generation prompt of a message, including the token that
ends it. Where a later turn renders an earlier one differently, as with interleaved thinking, each is an example with
its own context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from glm5.chat.guard import Guard
from glm5.chat.message import normalize_messages
from glm5.chat.template import ChatTemplate
from glm5.common.errors import DataError, RequestError
from glm5.train.data.forms import CONVERSATION_KEYS, conversation_of

THINKING = ("interleaved", "preserved", "off")
_MESSAGE = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "loss", "weight")


@dataclass(frozen=True)
class Example:
    """Token ids, and for each whether it counts in the loss."""

    ids: list[int]
    marks: list[bool]


@dataclass
class _Text:
    """A rendered conversation with a guard's marks, and (start, stop) of the assistant's text in it, last first."""

    text: str
    spans: list[tuple[int, int]] = field(default_factory=list)


def examples_of(row: Any, template: ChatTemplate, where: str) -> list[Example]:
    """The examples of a row; empty if no token counts in the loss. Raises `DataError` that begins with `where`."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a row is an object, got {type(row).__name__}")
    row = conversation_of(row, where)
    refuse_misspelt_keys(row, CONVERSATION_KEYS, where)
    if "token_ids" in row:
        return _from_ids(row, where)
    try:
        return _from_messages(row, template, where)
    except RequestError as error:
        raise DataError(f"{where}: {error}") from None


def conversation_ids(row: Mapping[str, Any], template: ChatTemplate, where: str = "the conversation") -> list[int]:
    """The ids of a row's whole conversation, up to the token that ends its last message, which must be the assistant's:
    what a reward model scores. Raises `DataError`."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], Mapping):
        raise DataError(f"{where}: messages must be a list of at least one message")
    if messages[-1].get("role") != "assistant":
        raise DataError(f"{where}: the last message must be the assistant's; got role {messages[-1].get('role')!r:.40}")
    context = [{**one, "loss": False} if isinstance(one, Mapping) else one for one in messages[:-1]]
    return examples_of({**row, "messages": [*context, {**messages[-1], "loss": True}]}, template, where)[-1].ids


def refuse_misspelt_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """DataError for a key that looks like a misspelt known one. Other unknown keys are ignored, published ones such as
    `prompt_id` among them."""
    for key in given.keys() - set(known):
        name = str(key).lower()
        near = get_close_matches(name, known, n=1, cutoff=0.8)
        if near and not name.startswith((f"{near[0]}_", f"{near[0]}-")):
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
    messages, has_loss = _without_flags(row["messages"], where)
    normalize_messages(messages)  # checks roles even if no message counts in the loss and nothing is rendered
    if not template.allow_control_tokens:
        _no_reasoning_in_contents(messages, where)
    guard = template.guard()
    rendered: list[_Text] = []
    for i in reversed(range(len(messages))):
        if has_loss[i]:
            _add(rendered, *_said(messages[: i + 1], row, thinking, template, guard, where))
    return [_encoded(text, guard) for text in reversed(rendered)]


def _no_reasoning_in_contents(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """DataError for <think> in contents: it would be trained on as plain text."""
    for i, message in enumerate(messages):
        content = message.get("content")
        embeds = isinstance(content, str) and content.lstrip().startswith("<think>")
        if message.get("role") == "assistant" and embeds and not message.get("reasoning_content"):
            raise DataError(
                f"{where}: messages[{i}].content begins with <think>, which is text there; put reasoning under "
                "reasoning_content, or tokenize with --allow-control-tokens-in-messages"
            )


def _without_flags(given: Sequence[Any], where: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """The messages without `loss` and `weight` keys, and which count in the loss: by default all of the assistant's."""
    messages: list[dict[str, Any]] = []
    has_loss: list[bool] = []
    for i, message in enumerate(given):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: messages[{i}] must be an object, got {type(message).__name__}")
        refuse_misspelt_keys(message, _MESSAGE, f"{where}: messages[{i}]")
        message = {key: value for key, value in message.items() if value is not None or key == "content"}
        is_assistant = message.get("role") == "assistant"
        if "loss" in message and "weight" in message:
            raise DataError(f"{where}: messages[{i}] has both loss and weight; give one of them")
        loss = message.get("loss", message.get("weight", is_assistant))
        if not isinstance(loss, int | float) or loss not in (0, 1) or (loss and not is_assistant):
            key, allowed = ("weight", "0 or 1") if "weight" in message else ("loss", "true or false")
            raise DataError(f"{where}: messages[{i}].{key}: got {loss!r:.40}; allowed: {allowed}, of assistants only")
        messages.append({key: value for key, value in message.items() if key not in ("loss", "weight")})
        has_loss.append(bool(loss))
    return messages, has_loss


def _said(
    messages: list[dict[str, Any]],
    row: Mapping[str, Any],
    thinking: str,
    template: ChatTemplate,
    guard: Guard,
    where: str,
) -> tuple[str, int, str]:
    """(the conversation up to the last message, where the assistant's text begins, the token that ends it)."""
    options = {key: row[key] for key in ("reasoning_effort",) if key in row}
    options |= {"clear_thinking": False} if thinking == "preserved" else {}
    last = messages[-1]
    if thinking == "off":
        if last.get("reasoning_content"):
            raise DataError(f"{where}: messages[{len(messages) - 1}] has reasoning_content, and thinking is off")
        modes = [False]
    else:
        begin = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        has_reasoning = any(message.get("reasoning_content") for message in messages[begin + 1 :])
        modes = [has_reasoning, not has_reasoning]
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
    """Add a span to the last conversation if that one contains this text as a prefix, else add a new conversation."""
    stop = len(done) + len(handover)
    if not rendered or not rendered[-1].text.startswith(done + handover):
        rendered.append(_Text(done + handover))
    rendered[-1].spans.append((start, stop))


def _encoded(rendered: _Text, guard: Guard) -> Example:
    """Encodes piece by piece. Pieces begin and end at special tokens, so no token spans two pieces."""
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
