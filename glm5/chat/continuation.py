"""Token ids that a chat template puts after a sampled reply, so that the reply itself is never tokenized again.

The text is rendered after a short conversation that ends with a reply, and that beginning is cut off. GLM's models end
a turn with the token that begins the next one (<|user|>, <|observation|>), so where that was sampled it is not
repeated.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from glm5.chat.template import ChatTemplate
from glm5.common.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_A_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


class Continuations:
    """Of a template, with these options for it, which must keep earlier reasoning (clear_thinking False)."""

    def __init__(self, template: ChatTemplate, options: Mapping[str, Any]) -> None:
        self._template, self._options = template, dict(options)
        self._guard = template.guard()  # of what is rendered after `_starts`
        self._starts: dict[tuple[int, bool], str] = {}

    def after(self, messages: Messages, *, has_tools: bool, call_ids: Sequence[str] | None = None) -> list[int]:
        """What follows a reply: `messages`, and the next generation prompt. `call_ids`: of the reply's calls; default:
        those that the first tool messages answer. Raises ConfigError where the template changes what stands before."""
        calls = [
            {"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}}
            for one in (_answered(messages) if call_ids is None else call_ids)
        ]
        before: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"} | ({"tool_calls": calls} if calls else {}),
        ]
        guard, shown, render = self._guard, [_A_TOOL] if has_tools else None, self._template.render_marked
        whole = render(guard, [*before, *map(dict, messages)], shown, **self._options)
        start = self._starts.get((len(calls), has_tools))
        if start is None or not whole.startswith(start):  # not known, or it has the ids of calls
            start = render(guard, before, shown, add_generation_prompt=False, **self._options)
            self._starts[len(calls), has_tools] = start
        if not whole.startswith(start):
            raise ConfigError(
                f"chat template {self._template.name}: a later turn changes what stands before it, so that sampled "
                "tokens could not be kept; allowed: a template that only appends, such as glm-5.2 or glm-5.3"
            )
        return guard.encode(whole[len(start) :])


def joined(ids: list[int], last_token: int) -> list[int]:
    """A continuation after a reply whose last token is `last_token`."""
    return ids[1:] if ids and ids[0] == last_token else ids


def _answered(messages: Messages) -> list[str]:
    """The calls that the tool messages at the beginning answer."""
    found: list[str] = []
    for one in messages:
        if one["role"] != "tool":
            break
        found.append(one["tool_call_id"])
    return found
