"""Maps three request fields about thinking to keywords of the chat template.

    chat_template_kwargs    {"enable_thinking": false}, {"thinking": false}, {"reasoning_effort": "high"}: passed on
    thinking                {"type": "enabled" | "disabled", "budget_tokens": n, "clear_thinking": true}
    reasoning_effort        none (off), minimal, low, medium, high, xhigh, max: the nearest level of the template

Contradicting fields are refused, and so is switching thinking off if the template cannot (GLM-5.3).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from glm5.chat.template import ChatTemplate
from glm5.common.errors import RequestError
from glm5.serve.http.body import StrictModel

# OpenAI's levels to the three of GLM-5.3; `_nearest` maps them to templates with fewer.
_LEVELS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}
_PROBE = [{"role": "user", "content": "?"}]
# Keywords that the server sets itself.
_NOT_FOR_TEMPLATES = {"messages", "tools", "add_generation_prompt"}


class Thinking(StrictModel):
    """`budget_tokens`: the thinking budget. `clear_thinking`: drop the reasoning of earlier turns."""

    type: Literal["enabled", "disabled"]
    budget_tokens: int | None = None
    clear_thinking: bool | None = None


def template_kwargs(
    template: ChatTemplate, given: Mapping[str, Any], thinking: Thinking | None, effort: str | None
) -> dict[str, Any]:
    """The keywords for the template. Raises RequestError naming the field."""
    kwargs = {key: value for key, value in given.items() if value is not None}
    if kwargs.get("add_generation_prompt") is True:  # some clients send it; it is the default
        del kwargs["add_generation_prompt"]
    if taken := sorted(_NOT_FOR_TEMPLATES & kwargs.keys()):
        param = f"chat_template_kwargs.{taken[0]}"
        raise RequestError(f"{param} is not for chat_template_kwargs: leave it out", param)
    switches = {f"chat_template_kwargs.{key}": kwargs[key] for key in ("enable_thinking", "thinking") if key in kwargs}
    if thinking is not None:
        switches["thinking"] = thinking.type == "enabled"
        if thinking.clear_thinking is not None:
            kwargs.setdefault("clear_thinking", thinking.clear_thinking)
    if effort == "none":
        switches["reasoning_effort"] = False
    elif effort is not None:
        kwargs.setdefault("reasoning_effort", _nearest(template, effort))
    if len(set(map(repr, switches.values()))) > 1:
        raise RequestError(
            f"{' and '.join(switches)} contradict each other about thinking: send one of them", [*switches][1]
        )
    off = next((name for name, value in switches.items() if value is False), None)
    if off is not None and template.always_thinks:
        raise RequestError(
            f'{off}: this model always thinks (template {template.name}); ask for less with reasoning_effort "low"',
            off,
        )
    if "thinking" in switches or "reasoning_effort" in switches:
        kwargs["enable_thinking"] = off is None
    return kwargs


def _nearest(template: ChatTemplate, effort: str) -> str:
    if effort not in _LEVELS:
        raise RequestError(
            f"reasoning_effort is {effort!r:.60}; allowed: none, {', '.join(_LEVELS)}", "reasoning_effort"
        )
    level = _LEVELS[effort]
    known = _known_levels(template)
    return "high" if level == "low" and level not in known and "high" in known else level


@lru_cache(maxsize=16)
def _known_levels(template: ChatTemplate) -> frozenset[str]:
    """The levels whose prompts differ from that of the highest."""
    highest = template.render(_PROBE, reasoning_effort="max")
    return frozenset(level for level in ("low", "high") if template.render(_PROBE, reasoning_effort=level) != highest)
