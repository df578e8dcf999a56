"""The answers of /generate on the wire, as SGLang writes them: each chunk of a stream holds all that came so far.

    {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens", ...}}

Log-probabilities are triples: value, token id, and the token's text where that is asked for. A chunk that repeats the
chunks before it would take as long to write as all of them: what may grow long is kept in the form in which it is sent.
"""

import base64
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.frontend.outputs import Logprob
from glm5.engine.transport.wire import RoutedExperts
from glm5.serve.generation.job import LogprobRow, Step
from glm5.serve.service.service import Service
from glm5.serve.sglang.body import Wanted


@dataclass(frozen=True)
class Asked:
    """A prompt, and what is to be told of its answers. `shows` None: text is not told in log-probabilities.

    `hides`: the answer is not told, as none was asked for. `experts_from`: the first token whose experts are told.
    """

    id: str
    prompt_ids: Sequence[int]
    wanted: Wanted
    shows: Tokenizer | None = None
    hides: bool = False
    experts_from: int | None = None
    tells_prompt: bool = False


@dataclass
class _Prompt:
    """What all answers to a prompt share, as it becomes known."""

    asked: Asked
    cached_tokens: int = 0
    logprobs: dict[str, str] = field(default_factory=dict)
    experts: list[RoutedExperts] = field(default_factory=list)


class PartialAnswer:
    """One answer to a prompt, as it grows."""

    def __init__(self, prompt: _Prompt, answer_id: str, service: Service):
        self._prompt, self._id, self._service = prompt, answer_id, service
        self._started = time.monotonic()
        self._text, self._ids, self._logprobs, self._likeliest = "", "", "", ""  # JSON, without what encloses it
        self._num_tokens, self._num_steps = 0, 0
        self._experts: list[RoutedExperts] = []
        self._versions: list[dict[str, Any]] = []
        self._ending: dict[str, Any] | None = None

    def take(self, step: Step) -> None:
        """A step of this answer."""
        asked = self._prompt.asked
        if step.routed_experts is not None:
            self._experts.append(step.routed_experts)
        if not asked.hides:
            self._text += json.dumps(step.text)[1:-1]
            self._ids = _longer(self._ids, [json.dumps(token_id) for token_id in step.token_ids])
            self._take_logprobs(step)
            self._take_version(step)
            self._num_tokens += len(step.token_ids)
            self._num_steps += bool(step.token_ids)
        if step.finish_reason is not None:
            self._ending = self._end(step)

    def written(self) -> str:
        """All of it so far, as JSON."""
        asked = self._prompt.asked
        prompt = {"prompt_token_ids": json.dumps(list(asked.prompt_ids))} if asked.tells_prompt else {}
        return _object(
            {"text": f'"{self._text}"', "output_ids": f"[{self._ids}]", "meta_info": _object(self._meta()), **prompt}
        )

    def _meta(self) -> dict[str, str]:
        asked = self._prompt.asked
        meta = {
            "id": self._id,
            "finish_reason": self._ending,
            "prompt_tokens": len(asked.prompt_ids),
            "completion_tokens": self._num_tokens,
            "cached_tokens": self._prompt.cached_tokens,
        }
        if self._versions:
            meta |= {"weight_version": self._versions[-1]["version"], "weight_versions": self._versions}
        if self._ending is not None:
            meta["e2e_latency"] = time.monotonic() - self._started
            if self._num_tokens > self._num_steps:  # else nothing was drafted, or nothing of it stood
                meta |= {"spec_verify_ct": self._num_steps, "spec_accept_length": self._num_tokens / self._num_steps}
            if asked.experts_from is not None:
                meta |= {"routed_experts": self._told_experts(), "routed_experts_start_len": asked.experts_from}
        written = {name: json.dumps(value) for name, value in meta.items()}
        if asked.wanted.logprobs:
            written |= {"input_token_logprobs": "[]", **self._prompt.logprobs}
            written["output_token_logprobs"] = f"[{self._logprobs}]"
            written["output_token_logprobs_length"] = json.dumps(self._num_tokens)
            if asked.wanted.num_likeliest:
                written.setdefault("input_top_logprobs", "[]")
                written["output_top_logprobs"] = f"[{self._likeliest}]"
        return written

    def _take_logprobs(self, step: Step) -> None:
        asked = self._prompt.asked
        if not step.logprobs:
            return
        drawn: list[str] = []
        likeliest: list[str] = []
        for token_id, row in zip(step.token_ids, step.logprobs, strict=True):
            drawn.append(_triple(row[token_id].tempered, token_id, asked.shows))
            if asked.wanted.num_likeliest:
                likeliest.append(_likeliest(row, asked))
        self._logprobs = _longer(self._logprobs, drawn)
        self._likeliest = _longer(self._likeliest, likeliest)

    def _take_version(self, step: Step) -> None:
        """Runs of tokens by the weights that drew them."""
        version, end = self._service.weight_name(step.version), self._num_tokens + len(step.token_ids)
        if self._versions and self._versions[-1]["version"] == version:
            self._versions[-1]["end"] = end
        elif step.token_ids:
            self._versions.append({"version": version, "start": self._num_tokens, "end": end})

    def _end(self, step: Step) -> dict[str, Any]:
        if self._prompt.asked.hides:
            return {"type": "length", "length": 0}
        match step.finish_reason:
            case "length":
                return {"type": "length", "length": self._num_tokens}
            case "abort":
                return {"type": "abort", "message": "the request was aborted"}
            case _:
                last = step.token_ids[-1] if step.token_ids else None
                return {"type": "stop", "matched": last if step.stop_reason is None else step.stop_reason}

    def _told_experts(self) -> str | None:
        """Base64 of int32 [tokens but the last, layers, experts a token]; zeros in layers that have no experts, and -1
        for tokens that were not computed."""
        asked = self._prompt.asked
        num_tokens = len(asked.prompt_ids) + self._num_tokens - 1
        runs = [*self._prompt.experts, *self._experts]
        if not runs or asked.experts_from is None:
            return None
        cfg = self._service.engine.cfg
        sparse = [layer_idx for layer_idx in range(cfg.num_hidden_layers) if cfg.is_moe(layer_idx)]
        shape = (max(0, num_tokens), cfg.num_hidden_layers, runs[0].shape[2])
        told = np.zeros(shape, dtype="<i4")
        told[:, sparse] = -1
        for run in runs:
            rows = np.frombuffer(run.experts, dtype="<i2").reshape(run.shape)[: max(0, num_tokens - run.start)]
            told[run.start : run.start + len(rows), sparse] = rows
        return base64.b64encode(told[asked.experts_from :].tobytes()).decode()


class Answers:
    """All answers of one request, each by the number of its prompt and its own."""

    def __init__(self, asked: Sequence[Asked], num_answers: int, service: Service):
        self.num_answers = num_answers
        self._prompts = [_Prompt(one) for one in asked]
        self._growing = [
            PartialAnswer(prompt, prompt.asked.id if num_answers == 1 else f"{prompt.asked.id}_{index}", service)
            for prompt in self._prompts
            for index in range(num_answers)
        ]

    def take(self, number: int, step: Step, cached_tokens: int) -> int:
        """A step of an answer to prompt `number`. Where in the batch the answer stands."""
        prompt = self._prompts[number]
        prompt.cached_tokens = cached_tokens
        if step.prompt_logprobs is not None and prompt.asked.wanted.start >= 0:
            prompt.logprobs = _of_prompt(prompt.asked, step.prompt_logprobs)
        run, num_prompt = step.routed_experts, len(prompt.asked.prompt_ids)
        if run is not None and run.start < num_prompt - 1 and self.num_answers > 1:
            # The prompt's are computed once, and come with whichever answer came first.
            prompt.experts.append(run)
        place = number * self.num_answers + step.index
        self._growing[place].take(step)
        return place

    def written(self, place: int) -> str:
        """One answer so far."""
        return self._growing[place].written()

    def whole(self) -> list[str]:
        """All of them."""
        return [growing.written() for growing in self._growing]


def _of_prompt(asked: Asked, rows: Sequence[LogprobRow]) -> dict[str, str]:
    """From the first token asked for; that one has none, as in SGLang: what comes before it may be anything."""
    start, wanted = asked.wanted.start, asked.wanted
    ids = asked.prompt_ids[start:]
    triples = [_triple(None, token_id, asked.shows) for token_id in ids[:1]]
    likeliest = ["null" for _ in ids[:1]]
    for token_id, row in zip(ids[1:], rows[start:], strict=True):
        triples.append(_triple(row[token_id].tempered, token_id, asked.shows))
        if wanted.num_likeliest:
            likeliest.append(_likeliest(row, asked))
    told = {"input_token_logprobs": f"[{', '.join(triples)}]"}
    return told | ({"input_top_logprobs": f"[{', '.join(likeliest)}]"} if wanted.num_likeliest else {})


def _likeliest(row: Mapping[int, Logprob], asked: Asked) -> str:
    best = sorted(row, key=lambda token_id: row[token_id].rank)[: asked.wanted.num_likeliest]
    return f"[{', '.join(_triple(row[token_id].tempered, token_id, asked.shows) for token_id in best)}]"


def _triple(value: float | None, token_id: int, shows: Tokenizer | None) -> str:
    """JSON has no infinity: null is of a token that could not be drawn."""
    said = None if value is None or math.isinf(value) else value
    return json.dumps([said, token_id, None if shows is None else shows.decode([token_id])])


def _longer(joined: str, more: Iterable[str]) -> str:
    added = ", ".join(more)
    return f"{joined}, {added}" if joined and added else joined or added


def _object(fields: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{json.dumps(name)}: {value}' for name, value in fields.items())}}}"
