"""Preference pairs: two answers to one prompt, of which one was chosen -> token ids and loss masks of both.

    {"prompt": text or messages, "chosen": text or messages, "rejected": text or messages}
    {"chosen": messages, "rejected": messages}         whole conversations; what they begin with alike is the prompt

forms.py has other forms. Answers of the first layout may repeat the prompt's messages. `tools`, `thinking` and
`reasoning_effort` are those of chat.py. Marked are the assistant's turns behind the prompt, as for supervised
fine-tuning.
"""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from glm5.chat.template import ChatTemplate
from glm5.common.errors import DataError
from glm5.train.data.chat import Example, examples_of, refuse_misspelt_keys
from glm5.train.data.forms import OPTIONS, PAIR_KEYS, pair_row_of, said_by


def pair_of(row: Mapping[str, Any], template: ChatTemplate, where: str) -> tuple[Example, Example]:
    """The chosen and the rejected conversation. Raises `DataError` that begins with `where`."""
    row = pair_row_of(row, where)
    refuse_misspelt_keys(row, PAIR_KEYS, where)
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
    options = {key: row[key] for key in OPTIONS if key in row}
    pair = [_example(messages, shared, options, template, where) for messages in (chosen, rejected)]
    if pair[0].ids == pair[1].ids:
        raise DataError(f"{where}: chosen and rejected are equal answers once they are rendered; leave such rows out")
    return pair[0], pair[1]


def _conversation(row: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """All messages of one of the two conversations."""
    if "prompt" not in row and isinstance(row[key], str):
        raise DataError(f"{where}: {key} is a text, and there is no prompt; give one, or messages under {key}")
    prompt = said_by("user", row["prompt"], f"{where}: prompt") if "prompt" in row else []
    answer = said_by("assistant", row[key], f"{where}: {key}")
    return answer if answer[: len(prompt)] == prompt else prompt + answer


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
