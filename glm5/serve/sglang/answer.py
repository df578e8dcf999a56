"""The response of /generate in SGLang's format: each chunk of a stream contains the complete output so far.

    {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens", ...}}

Log-probabilities are triples: value, token id, and the token's text if requested. To avoid serializing the same output
for every chunk again, fields that may grow long are kept as JSON text and extended.
"""

import base64
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.frontend.outputs import Logprob
from glm5.serve.generation.job import LogprobRow, Step
from glm5.serve.generation.routed_experts import ExpertRuns
from glm5.serve.service.service import Service
from glm5.serve.sglang.body import LogprobRange


@dataclass(frozen=True)
class PromptSpec:
    """A prompt, and the fields requested for its answers. `tokenizer` None: log-probabilities without text.

    `omits_output`: max_new_tokens is 0. `experts_from`: the first token whose routed experts are returned.
    """

    id: str
    prompt_ids: Sequence[int]
    logprobs: LogprobRange
    tokenizer: Tokenizer | None = None
    omits_output: bool = False
    experts_from: int | None = None
    returns_prompt_ids: bool = False


@dataclass
class _Prompt:
    """The state that all answers to a prompt share."""

    spec: PromptSpec
    experts: ExpertRuns
    cached_tokens: int = 0
    logprobs: dict[str, str] = field(default_factory=dict)


class PartialAnswer:
    """The output of one answer so far, the prompt's number `index`."""

    def __init__(self, prompt: _Prompt, index: int, answer_id: str, service: Service):
        self._prompt, self._index, self._id, self._service = prompt, index, answer_id, service
        self._started = time.monotonic()
        self._text, self._ids, self._logprobs, self._likeliest = "", "", "", ""  # JSON, without quotes or brackets
        self._num_tokens, self._num_steps = 0, 0
        self._versions: list[dict[str, Any]] = []
        self._ending: dict[str, Any] | None = None

    def take(self, step: Step) -> None:
        """Add a step of this answer."""
        spec = self._prompt.spec
        self._prompt.experts.take(step)
        if not spec.omits_output:
            self._text += json.dumps(step.text)[1:-1]
            self._ids = _longer(self._ids, [json.dumps(token_id) for token_id in step.token_ids])
            self._take_logprobs(step)
            self._take_version(step)
            self._num_tokens += len(step.token_ids)
            self._num_steps += step.num_steps
        if step.finish_reason is not None:
            self._ending = self._end(step)

    def written(self) -> str:
        """The output so far, as JSON."""
        spec = self._prompt.spec
        prompt = {"prompt_token_ids": json.dumps(list(spec.prompt_ids))} if spec.returns_prompt_ids else {}
        return _object(
            {"text": f'"{self._text}"', "output_ids": f"[{self._ids}]", "meta_info": _object(self._meta()), **prompt}
        )

    def _meta(self) -> dict[str, str]:
        spec = self._prompt.spec
        meta = {
            "id": self._id,
            "finish_reason": self._ending,
            "prompt_tokens": len(spec.prompt_ids),
            "completion_tokens": self._num_tokens,
            "cached_tokens": self._prompt.cached_tokens,
        }
        if self._versions:
            meta |= {"weight_version": self._versions[-1]["version"], "weight_versions": self._versions}
        if self._ending is not None:
            meta["e2e_latency"] = time.monotonic() - self._started
            if self._num_tokens > self._num_steps:  # else no drafted token was accepted
                meta |= {"spec_verify_ct": self._num_steps, "spec_accept_length": self._num_tokens / self._num_steps}
            if spec.experts_from is not None:
                meta |= {"routed_experts": self._routed_experts(), "routed_experts_start_len": spec.experts_from}
        written = {name: json.dumps(value) for name, value in meta.items()}
        if spec.logprobs.enabled:
            written |= {"input_token_logprobs": "[]", **self._prompt.logprobs}
            written["output_token_logprobs"] = f"[{self._logprobs}]"
            written["output_token_logprobs_length"] = json.dumps(self._num_tokens)
            if spec.logprobs.num_logprobs:
                written.setdefault("input_top_logprobs", "[]")
                written["output_top_logprobs"] = f"[{self._likeliest}]"
        return written

    def _take_logprobs(self, step: Step) -> None:
        spec = self._prompt.spec
        if not step.logprobs:
            return
        drawn: list[str] = []
        likeliest: list[str] = []
        for token_id, row in zip(step.token_ids, step.logprobs, strict=True):
            drawn.append(_triple(row[token_id].tempered, token_id, spec.tokenizer))
            if spec.logprobs.num_logprobs:
                likeliest.append(_likeliest(row, spec))
        self._logprobs = _longer(self._logprobs, drawn)
        self._likeliest = _longer(self._likeliest, likeliest)

    def _take_version(self, step: Step) -> None:
        """Record the weight version of the new tokens, as ranges of tokens."""
        version, end = self._service.weight_names.of(step.version), self._num_tokens + len(step.token_ids)
        if self._versions and self._versions[-1]["version"] == version:
            self._versions[-1]["end"] = end
        elif step.token_ids:
            self._versions.append({"version": version, "start": self._num_tokens, "end": end})

    def _end(self, step: Step) -> dict[str, Any]:
        if self._prompt.spec.omits_output:
            return {"type": "length", "length": 0}
        match step.finish_reason:
            case "length":
                return {"type": "length", "length": self._num_tokens}
            case "abort":
                return {"type": "abort", "message": "the request was aborted"}
            case _:
                last = step.token_ids[-1] if step.token_ids else None
                return {"type": "stop", "matched": last if step.stop_reason is None else step.stop_reason}

    def _routed_experts(self) -> str | None:
        """Base64 of int32 [tokens except the last, layers, experts per token], from the requested token."""
        spec = self._prompt.spec
        experts = self._prompt.experts.by_layer(self._index, self._num_tokens, self._service.engine.cfg)
        if experts is None or spec.experts_from is None:
            return None
        return base64.b64encode(experts[spec.experts_from :].tobytes()).decode()


class Answers:
    """All answers of one request; answer j to prompt i has the index i * num_answers + j."""

    def __init__(self, specs: Sequence[PromptSpec], num_answers: int, service: Service):
        self.num_answers = num_answers
        self._prompts = [_Prompt(spec, ExpertRuns(len(spec.prompt_ids))) for spec in specs]
        self._growing = [
            PartialAnswer(prompt, index, prompt.spec.id if num_answers == 1 else f"{prompt.spec.id}_{index}", service)
            for prompt in self._prompts
            for index in range(num_answers)
        ]

    def take(self, number: int, step: Step, cached_tokens: int) -> int:
        """Add a step of an answer to prompt `number`. Returns the index of the answer."""
        prompt = self._prompts[number]
        prompt.cached_tokens = cached_tokens
        if step.prompt_logprobs is not None and prompt.spec.logprobs.start >= 0:
            prompt.logprobs = _of_prompt(prompt.spec, step.prompt_logprobs)
        place = number * self.num_answers + step.index
        self._growing[place].take(step)
        return place

    def written(self, place: int) -> str:
        """One answer so far, as JSON."""
        return self._growing[place].written()

    def all_written(self) -> list[str]:
        """All answers so far, as JSON."""
        return [growing.written() for growing in self._growing]


def _of_prompt(spec: PromptSpec, rows: Sequence[LogprobRow]) -> dict[str, str]:
    """The prompt's log-probabilities from the requested start; the first is null, as in SGLang."""
    start, logprobs = spec.logprobs.start, spec.logprobs
    ids = spec.prompt_ids[start:]
    triples = [_triple(None, token_id, spec.tokenizer) for token_id in ids[:1]]
    likeliest = ["null" for _ in ids[:1]]
    for token_id, row in zip(ids[1:], rows[start:], strict=True):
        triples.append(_triple(row[token_id].tempered, token_id, spec.tokenizer))
        if logprobs.num_logprobs:
            likeliest.append(_likeliest(row, spec))
    fields = {"input_token_logprobs": f"[{', '.join(triples)}]"}
    return fields | ({"input_top_logprobs": f"[{', '.join(likeliest)}]"} if logprobs.num_logprobs else {})


def _likeliest(row: Mapping[int, Logprob], spec: PromptSpec) -> str:
    best = sorted(row, key=lambda token_id: row[token_id].rank)[: spec.logprobs.num_logprobs]
    return f"[{', '.join(_triple(row[token_id].tempered, token_id, spec.tokenizer) for token_id in best)}]"


def _triple(value: float | None, token_id: int, tokenizer: Tokenizer | None) -> str:
    """A triple as JSON. Without infinity in JSON, null stands for a token that could not be sampled."""
    finite = None if value is None or math.isinf(value) else value
    return json.dumps([finite, token_id, None if tokenizer is None else tokenizer.decode([token_id])])


def _longer(joined: str, more: Iterable[str]) -> str:
    added = ", ".join(more)
    return f"{joined}, {added}" if joined and added else joined or added


def _object(fields: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{json.dumps(name)}: {value}' for name, value in fields.items())}}}"
