"""The response of /v1/completions: stream chunks, or the completion that they add up to."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.chat.events import ContentDelta
from glm5.serve.chat.answer import usage_dict
from glm5.serve.completions.body import CompletionBody
from glm5.serve.generation.job import LogprobRow, Step, Usage
from glm5.serve.generation.logprobs import CompletionLogprobs, TokenTexts, prompt_logprobs
from glm5.serve.http.sse import SPACE, PlainEvents, Spaced, event


@dataclass(frozen=True)
class PromptInput:
    """One prompt of a request, as text (None if it was sent as token ids) and as token ids."""

    text: str | None
    ids: Sequence[int]


@dataclass
class _Choice:
    """The state of one answer. `echoes`: the prompt must be sent first."""

    prompt_input: PromptInput
    logprobs: CompletionLogprobs | None
    echoes: bool
    is_begun: bool = False


@dataclass
class _ChoiceDelta:
    """What a step adds to a choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class CompletionAnswer:
    """Converts the steps of one request to chunks or one completion. Choice i * n + j is answer j to prompt i."""

    def __init__(
        self, body: CompletionBody, answer_id: str, model: str, prompts: Sequence[PromptInput], formatter: TokenTexts
    ) -> None:
        self.body, self.prompts, self.formatter = body, prompts, formatter
        self.head = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self.skips_special = body.skip_special_tokens is not False
        self._choices = [self._new(prompt_input) for prompt_input in prompts for _ in range(body.n)]
        self._prompt_rows: dict[int, Sequence[LogprobRow]] = {}
        self.plain_events: PlainEvents = {}
        asks_more = body.logprobs is not None or body.return_token_ids or body.repeats_usage or body.echo
        self._has_plain_chunks = not asks_more and body.max_tokens > 0

    def event(self, number: int, step: Step, usage: Usage | None) -> str:
        """The chunk of a step as an event, or an empty text. In most chunks only one text is new."""
        index = number * self.body.n + step.index
        is_plain = step.finish_reason is None and step.prompt_logprobs is None and self._choices[index].is_begun
        if self._has_plain_chunks and is_plain:
            spaced = self.plain_events.get((index, ContentDelta))
            if spaced is None:
                sample = self.chunk(number, Step(step.index, [ContentDelta(SPACE)], ()), usage)
                spaced = self.plain_events[index, ContentDelta] = Spaced(event(sample or {}))
            text = step.text
            return spaced.filled(text) if text or step.token_ids else ""
        chunk = self.chunk(number, step, usage)
        return "" if chunk is None else event(chunk)

    def chunk(self, number: int, step: Step, usage: Usage | None) -> dict[str, Any] | None:
        """The chunk of a step of prompt `number`, with the usage so far; None for a step without visible output."""
        delta = self._delta(number, step)
        if not (delta.text or delta.token_ids or delta.finish_reason):
            return None
        index = number * self.body.n + step.index
        choice = self._written(index, delta)
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

    def completion(self, steps: Iterable[tuple[int, Step]], usage: Usage) -> dict[str, Any]:
        """The completion that all steps add up to."""
        body = self.body
        joined = [_ChoiceDelta() for _ in self._choices]
        for number, step in steps:
            _append(joined[number * body.n + step.index], self._delta(number, step))
        choices: list[dict[str, Any]] = []
        for index, delta in enumerate(joined):
            number = index // body.n
            choice = self._written(index, delta)
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(self._prompt_rows.get(number, ()))
            if body.return_token_ids:
                choice["prompt_token_ids"] = list(self.prompts[number].ids)
            choices.append(choice)
        return {**self.head, "choices": choices, "usage": usage_dict(usage)}

    def _new(self, prompt_input: PromptInput) -> _Choice:
        wanted, logprobs = self.body.logprobs, None
        if wanted is not None:
            logprobs = CompletionLogprobs(wanted, self.formatter, skip_special=self.skips_special)
        return _Choice(prompt_input, logprobs, echoes=self.body.echo)

    def _delta(self, number: int, step: Step) -> _ChoiceDelta:
        choice = self._choices[number * self.body.n + step.index]
        if step.prompt_logprobs is not None:
            self._prompt_rows[number] = step.prompt_logprobs
        # With max_tokens 0 the engine still generates one token, to get the prompt's log-probabilities.
        omits_output = self.body.max_tokens == 0
        delta = _ChoiceDelta("", [], None, "length" if omits_output and step.finish_reason else step.finish_reason)
        ids: list[int] = []
        rows: list[LogprobRow | None] = []
        if choice.echoes:
            choice.echoes = False
            delta.text = self._text(choice.prompt_input)
            ids, rows = list(choice.prompt_input.ids), [None, *self._prompt_rows.get(number, ())]
        if not omits_output:
            delta.text += step.text
            delta.token_ids, delta.stop_reason = list(step.token_ids), step.stop_reason
            ids, rows = [*ids, *step.token_ids], [*rows, *(step.logprobs or ())]
        if choice.logprobs is not None and ids:
            delta.logprobs = choice.logprobs.of(ids, rows)
        return delta

    def _text(self, prompt_input: PromptInput) -> str:
        if prompt_input.text is not None:
            return prompt_input.text
        return self.formatter.tokenizer.decode(prompt_input.ids, skip_special=self.skips_special)

    def _written(self, index: int, delta: _ChoiceDelta) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": delta.logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return choice | ({"token_ids": delta.token_ids} if self.body.return_token_ids else {})


def _append(joined: _ChoiceDelta, delta: _ChoiceDelta) -> None:
    joined.text += delta.text
    joined.token_ids += delta.token_ids
    joined.finish_reason, joined.stop_reason = delta.finish_reason, delta.stop_reason
    if joined.logprobs is None:
        joined.logprobs = delta.logprobs
    elif delta.logprobs is not None:
        for key, values in delta.logprobs.items():
            joined.logprobs[key] += values
