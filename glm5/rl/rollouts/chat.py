"""Messages to tokens and back. A conversation only ever grows: tokens that were sampled are never tokenized again.

The chat template renders the first prompt. Of later turns only what is new is rendered and tokenized
(chat/continuation.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from glm5.chat.continuation import Continuations, joined
from glm5.chat.parser import Functions, parse_ids
from glm5.chat.template import ChatTemplate
from glm5.common.errors import ConfigError, RequestError
from glm5.rl.environments.protocol import Message, Reply
from glm5.train.data.chat import examples_of

_MOST_KEPT = 4096  # prompts, continuations and replies whose conversion is remembered: groups share prompts
_LONGEST_KEPT = 64  # tokens of such a reply

Tools = Sequence[Mapping[str, Any]]
Key = TypeVar("Key")
Value = TypeVar("Value")


class TokenChat:
    """A chat template and its tokenizer. ConfigError where a template's later turns change what stands before them, or
    where it always thinks and `enable_thinking` is False."""

    def __init__(self, template: ChatTemplate, *, enable_thinking: bool = False) -> None:
        assert template.tokenizer is not None, "a template without a tokenizer"
        self.template, self.tokenizer, self.enable_thinking = template, template.tokenizer, enable_thinking
        self._options = {"enable_thinking": enable_thinking, "clear_thinking": False}
        self._prompts: dict[str, list[int]] = {}
        self._known: dict[str, list[int]] = {}
        self._replies: dict[tuple[tuple[int, ...], str, int], Reply] = {}
        self._functions: dict[str, Functions] = {}
        self._continuations = Continuations(template, self._options)
        try:
            self._end = self.continuation([{"role": "user", "content": "a"}], (), -1)[0]
        except RequestError as error:
            raise ConfigError(f"rollouts.{error}; allowed: rollouts.enable_thinking = true") from None

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Token ids of a first prompt."""
        return _remembered(
            self._prompts,
            _key(messages, tools),
            lambda: self.template.encode([dict(one) for one in messages], list(tools) or None, **self._options),
        )

    def continuation(self, messages: Sequence[Message], tools: Tools, last_token: int) -> list[int]:
        """Token ids that follow a sampled reply: messages of the environment, and the next generation prompt. Of tools
        it counts only that there are some: a template describes them at the beginning."""
        has_tools = bool(tools)
        key = f"{has_tools}{_key(messages, ())}"
        ids = _remembered(self._known, key, lambda: self._continuations.after(messages, has_tools=has_tools))
        return joined(ids, last_token)

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation as a rollout would have them, and for each whether a reply has it: for
        supervised training."""
        if any(set(one) - {"role", "content"} for one in messages if one["role"] == "assistant"):
            thinking = "preserved" if self.enable_thinking else "off"
            row = {"messages": [dict(one) for one in messages], "tools": list(tools), "thinking": thinking}
            (found,) = examples_of(row, self.template, "a shown conversation")
            return found.ids, found.marks
        ids, marks, heard = list[int](), list[bool](), list[Message]()
        for message in messages:
            if message["role"] != "assistant":
                heard.append(message)
                continue
            context = self.continuation(heard, tools, ids[-1]) if ids else self.prompt(heard, tools)
            said = self.said(message["content"])
            ids += [*context, *said]
            marks += [False] * len(context) + [True] * len(said)
            heard = []
        return ids, marks

    def said(self, content: str) -> list[int]:
        """Token ids of a reply of text alone, as a policy would sample them."""
        return [*self.tokenizer.encode(content, allow_special=False), self._end]

    def reply(self, token_ids: Sequence[int], tools: Tools, *, is_truncated: bool, num_calls: int = 0) -> Reply:
        """What sampled tokens say. `num_calls`: of earlier replies of the conversation. Calls are numbered, so that
        what a group's rollouts say alike is equal, and so is what follows."""
        offered = repr(tools)

        def parsed() -> Reply:
            return self._parse(token_ids, tools, offered, is_truncated=is_truncated, num_calls=num_calls)

        if is_truncated or len(token_ids) > _LONGEST_KEPT:
            return parsed()
        return _remembered(self._replies, (tuple(token_ids), offered, num_calls), parsed)

    def _parse(
        self, token_ids: Sequence[int], tools: Tools, offered: str, *, is_truncated: bool, num_calls: int
    ) -> Reply:
        functions = _remembered(self._functions, offered, lambda: Functions(list(tools) or None))
        parsed = parse_ids(self.tokenizer, token_ids, functions, reasoning=self.enable_thinking)
        calls = [
            {"id": f"call_{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for number, call in enumerate(parsed.tool_calls, num_calls)
        ]
        return Reply(parsed.content or "", parsed.reasoning or "", calls, is_truncated)


def _key(messages: Sequence[Message], tools: Tools) -> str:
    """The same for the same conversations, whose messages are plain JSON; in a fraction of the time that JSON takes."""
    return repr((list(map(dict, messages)), list(map(dict, tools))))


def _remembered(known: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST_KEPT:
            known.clear()
        found = known[key] = make()
    return found
