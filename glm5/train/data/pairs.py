"""Preference pairs: two answers to one prompt, of which one was chosen -> token ids and loss masks of both.

    {"prompt": text or messages, "chosen": text or messages, "rejected": text or messages}
    {"chosen": messages, "rejected": messages}         whole conversations; what they begin with alike is the prompt

Answers of the first layout may repeat the prompt's messages. `tools`, `thinking` and `reasoning_effort` are those of
chat.py. Marked are the assistant's turns behind the prompt, as for supervised fine-tuning.
"""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from glm5.chat.template import ChatTemplate
from glm5.common.errors import DataError
from glm5.train.data.chat import Example, examples_of, refuse_misspelt_keys

KEYS = ("prompt", "chosen", "rejected")
_OPTIONS = ("tools", "thinking", "reasoning_effort")


def is_pair(row: Any) -> bool:
    """Whether a row is meant as a preference pair."""
    return isinstance(row, Mapping) and "chosen" in row and "rejected" in row


def pair_of(row: Mapping[str, Any], template: ChatTemplate, where: str) -> tuple[Example, Example]:
    """The chosen and the rejected conversation. Raises `DataError` that begins with `where`."""
    refuse_misspelt_keys(row, (*KEYS, *_OPTIONS), where)
    chosen, rejected = (_conversation(row, key, where) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are equal answers; leave such rows out")
    shared = next(i for i, (a, b) in enumerate(zip_longest(chosen, rejected)) if a != b)
    for key, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[-1].get("role") != "assistant":
            raise DataError(f"{where}: {key} does not end with an assistant turn, so there is no answer to compare")
        if len(messages) == shared or messages[shared].get("role") != "assistant":
            raise DataError(
                f"{where}: chosen and rejected have different prompts: they differ from message {shared} on, which is "
                f"no answer in {key}; both must begin with the same messages, up to an assistant's"
            )
    options = {key: row[key] for key in _OPTIONS if key in row}
    pair = [_example(messages, shared, options, template, where) for messages in (chosen, rejected)]
    if pair[0].ids == pair[1].ids:
        raise DataError(f"{where}: chosen and rejected are equal answers once they are rendered; leave such rows out")
    return pair[0], pair[1]


def _conversation(row: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """All messages of one of the two conversations."""
    if "prompt" not in row and isinstance(row[key], str):
        raise DataError(f"{where}: {key} is a text, and there is no prompt; give one, or messages under {key}")
    prompt = _messages(row["prompt"], "user", f"{where}: prompt") if "prompt" in row else []
    answer = _messages(row[key], "assistant", f"{where}: {key}")
    return answer if answer[: len(prompt)] == prompt else prompt + answer


def _messages(given: Any, role: str, where: str) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(one, Mapping) for one in given):
        raise DataError(f"{where}: got {given!r:.40}; allowed: a text, or a list of at least one message")
    return [dict(one) for one in given]


def _example(
    messages: list[dict[str, Any]], shared: int, options: Mapping[str, Any], template: ChatTemplate, where: str
) -> Example:
    """A conversation of which the first `shared` messages are the prompt. Where the template renders a turn otherwise
    once others follow, only its last rendering is there, as context."""
    prompt = [
        {key: value for key, value in one.items() if key not in ("loss", "weight")} | {"loss": False}
        for one in messages[:shared]
    ]
    last = {key: value for key, value in messages[-1].items() if key not in ("loss", "weight")}
    return examples_of({"messages": [*prompt, *messages[shared:-1], last], **options}, template, where)[-1]
