"""The answer to a text completion on the wire: chunks of a stream, or the whole that their concatenation is."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.serve.chat.answer import usage_dict
from glm5.serve.completions.body import CompletionBody
from glm5.serve.generation.job import LogprobRow, Step, Usage
from glm5.serve.generation.logprobs import CompletionLogprobs, Speller, prompt_logprobs


@dataclass(frozen=True)
class Asked:
    """One prompt of a request, in the form in which it was sent and as token ids."""

    text: str | None
    ids: Sequence[int]


@dataclass
class _Choice:
    """One answer as it grows. `echoes`: the prompt is still to be shown."""

    asked: Asked
    logprobs: CompletionLogprobs | None
    echoes: bool
    is_begun: bool = False


@dataclass
class _Shown:
    """What a step adds to a choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class CompletionAnswer:
    """Writes the steps of one request. Choice i * n + j is answer j to prompt i."""

    def __init__(
        self, body: CompletionBody, answer_id: str, model: str, prompts: Sequence[Asked], speller: Speller
    ) -> None:
        self.body, self.prompts, self.speller = body, prompts, speller
        self.head = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self.skips_special = body.skip_special_tokens is not False
        self._choices = [self._new(asked) for asked in prompts for _ in range(body.n)]
        self._prompt_rows: dict[int, Sequence[LogprobRow]] = {}

    def chunk(self, number: int, step: Step, usage: Usage | None) -> dict[str, Any] | None:
        """A step of prompt `number` as a chunk of a stream, with the usage so far; None where it shows nothing."""
        shown = self._show(number, step)
        if not (shown.text or shown.token_ids or shown.finish_reason):
            return None
        index = number * self.body.n + step.index
        choice = self._written(index, shown)
        if step.prompt_logprobs is not None and self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(step.prompt_logprobs)
        if self.body.return_token_ids and not self._choices[index].is_begun:
            choice["prompt_token_ids"] = list(self.prompts[number].ids)
        self._choices[index].is_begun = True
        content = {**self.head, "choices": [choice]}
        if self.body.includes_usage:
            content["usage"] = None if usage is None else usage_dict(usage)
        return content

    def last_chunk(self, usage: Usage) -> dict[str, Any]:
        """Usage, in a chunk without choices."""
        return {**self.head, "choices": [], "usage": usage_dict(usage)}

    def whole(self, steps: Iterable[tuple[int, Step]], usage: Usage) -> dict[str, Any]:
        """The answers in one piece."""
        body = self.body
        joined = [_Shown() for _ in self._choices]
        for number, step in steps:
            _grow(joined[number * body.n + step.index], self._show(number, step))
        choices: list[dict[str, Any]] = []
        for index, shown in enumerate(joined):
            number = index // body.n
            choice = self._written(index, shown)
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(self._prompt_rows.get(number, ()))
            if body.return_token_ids:
                choice["prompt_token_ids"] = list(self.prompts[number].ids)
            choices.append(choice)
        return {**self.head, "choices": choices, "usage": usage_dict(usage)}

    def _new(self, asked: Asked) -> _Choice:
        wanted, logprobs = self.body.logprobs, None
        if wanted is not None:
            logprobs = CompletionLogprobs(wanted, self.speller, skip_special=self.skips_special)
        return _Choice(asked, logprobs, echoes=self.body.echo)

    def _show(self, number: int, step: Step) -> _Shown:
        choice = self._choices[number * self.body.n + step.index]
        if step.prompt_logprobs is not None:
            self._prompt_rows[number] = step.prompt_logprobs
        # Without tokens to write, one is drawn all the same: the prompt's figures come with it.
        hides = self.body.max_tokens == 0
        shown = _Shown("", [], None, "length" if hides and step.finish_reason else step.finish_reason)
        ids: list[int] = []
        rows: list[LogprobRow | None] = []
        if choice.echoes:
            choice.echoes = False
            shown.text = self._text(choice.asked)
            ids, rows = list(choice.asked.ids), [None, *self._prompt_rows.get(number, ())]
        if not hides:
            shown.text += step.text
            shown.token_ids, shown.stop_reason = list(step.token_ids), step.stop_reason
            ids, rows = [*ids, *step.token_ids], [*rows, *(step.logprobs or ())]
        if choice.logprobs is not None and ids:
            shown.logprobs = choice.logprobs.of(ids, rows)
        return shown

    def _text(self, asked: Asked) -> str:
        if asked.text is not None:
            return asked.text
        return self.speller.tokenizer.decode(asked.ids, skip_special=self.skips_special)

    def _written(self, index: int, shown: _Shown) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": shown.text,
            "logprobs": shown.logprobs,
            "finish_reason": shown.finish_reason,
            "stop_reason": shown.stop_reason,
        }
        return choice | ({"token_ids": shown.token_ids} if self.body.return_token_ids else {})


def _grow(joined: _Shown, shown: _Shown) -> None:
    joined.text += shown.text
    joined.token_ids += shown.token_ids
    joined.finish_reason, joined.stop_reason = shown.finish_reason, shown.stop_reason
    if joined.logprobs is None:
        joined.logprobs = shown.logprobs
    elif shown.logprobs is not None:
        for key, values in shown.logprobs.items():
            joined.logprobs[key] += values
