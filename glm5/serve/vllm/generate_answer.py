"""The response of /inference/v1/generate: stream chunks, or the whole that they add up to.

    {"request_id", "choices": [{"index", "token_ids", "logprobs", "finish_reason", "stop_reason", "sampling_mask",
                                "routed_experts"}], "usage", "prompt_logprobs", "prompt_token_ids"}

It is written without spaces, and `data` of `routed_experts` comes first: clients find it without parsing megabytes.
"""

import base64
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from glm5.kernels.sampled_logprobs import kept_ids
from glm5.serve.chat.answer import usage_dict
from glm5.serve.generation.job import Job, LogprobRow, Step, Usage
from glm5.serve.generation.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from glm5.serve.generation.routed_experts import ExpertRuns
from glm5.serve.http.errors import ApiError
from glm5.serve.service.service import Service
from glm5.serve.vllm.generate_body import GenerateBody


def written(content: Mapping[str, Any]) -> str:
    """Compact JSON."""
    return json.dumps(content, separators=(",", ":"))


@dataclass
class _Choice:
    """One answer so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)
    sampling_mask: list[bytes] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class GenerateAnswer:
    """Converts the steps of one request to chunks, or to one response. Raises ApiError for an aborted answer: clients
    know only answers that stopped, or that reached their length."""

    def __init__(self, body: GenerateBody, job: Job, service: Service, experts_from: int):
        self.body, self.job, self.service, self.experts_from = body, job, service, experts_from
        self.head = {"request_id": job.id, "created": int(time.time()), "model": body.model or service.model_names[0]}
        self._formatter = TokenTexts(service.tokenizer, as_ids=True)
        self._experts, self._num_tokens = ExpertRuns(len(job.prompt_ids)), dict[int, int]()
        self._is_begun = False

    def chunk(self, step: Step, usage: Usage) -> dict[str, Any] | None:
        """The chunk of a step; None for a step without tokens and end. The prompt's fields are in the first."""
        self._take(step)
        if not step.token_ids and step.finish_reason is None and step.prompt_logprobs is None:
            return None
        reported = list(step.logprobs or ()), list(step.sampling_mask)
        delta = _Choice(list(step.token_ids), *reported, step.finish_reason, step.stop_reason)
        content = {**self.head, "choices": [self._choice(step.index, delta, is_last=step.finish_reason is not None)]}
        if step.prompt_logprobs is not None:
            content["prompt_logprobs"] = prompt_logprobs(step.prompt_logprobs)
        if self.body.return_token_ids and not self._is_begun:
            content["prompt_token_ids"] = list(self.job.prompt_ids)
        self._is_begun = True
        if self.body.includes_usage:
            content["usage"] = usage_dict(usage) if self.body.repeats_usage else None
        return content

    def last_chunk(self, usage: Usage) -> dict[str, Any]:
        """Usage, in a chunk without choices."""
        return {**self.head, "choices": [], "usage": usage_dict(usage)}

    def whole(self, steps: Iterable[Step], usage: Usage) -> dict[str, Any]:
        """The response that all steps add up to."""
        choices = [_Choice() for _ in range(self.job.params.n)]
        found: Sequence[LogprobRow] | None = None
        for step in steps:
            self._take(step)
            choice = choices[step.index]
            choice.token_ids += step.token_ids
            choice.logprobs += step.logprobs or ()
            choice.sampling_mask += step.sampling_mask
            choice.finish_reason, choice.stop_reason = step.finish_reason, step.stop_reason
            found = step.prompt_logprobs if step.prompt_logprobs is not None else found
        written_choices = [self._choice(index, choice, is_last=True) for index, choice in enumerate(choices)]
        content = {**self.head, "choices": written_choices, "usage": usage_dict(usage)}
        if self.job.params.prompt_logprobs is not None:
            content["prompt_logprobs"] = prompt_logprobs(found or ())
        return content | ({"prompt_token_ids": list(self.job.prompt_ids)} if self.body.return_token_ids else {})

    def _take(self, step: Step) -> None:
        if step.finish_reason == "abort":
            raise ApiError(499, "the request was aborted", code="request_aborted")
        self._experts.take(step)
        self._num_tokens[step.index] = self._num_tokens.get(step.index, 0) + len(step.token_ids)

    def _choice(self, index: int, choice: _Choice, *, is_last: bool) -> dict[str, Any]:
        most = self.job.params.logprobs
        content: dict[str, Any] = {
            "index": index,
            "token_ids": choice.token_ids,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if most is not None:
            found = chat_logprobs(choice.logprobs, most, self._formatter, with_bytes=False)
            content["logprobs"] = {"content": found["content"]}
        if self.service.sampling_masks:
            masks = [kept_ids(mask).tolist() for mask in choice.sampling_mask]
            content["sampling_mask"] = masks if self.job.options.sampling_mask else None
        if is_last and self.job.options.routed_experts:
            content["routed_experts"] = self._routed_experts(index)
        return content

    def _routed_experts(self, index: int) -> dict[str, Any] | None:
        """Experts from the requested token on, in the smallest type that holds them."""
        experts, start = (
            self._experts.by_layer(index, self._num_tokens[index], self.service.engine.cfg),
            self.experts_from,
        )
        if experts is None:
            return None
        rows = experts[start:]
        lowest, highest = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
        dtype = "int32" if lowest < 0 or highest > np.iinfo("uint16").max else "uint16" if highest > 255 else "uint8"
        data = base64.b64encode(rows.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
        return {"data": data, "shape": list(rows.shape), "start": start, "dtype": dtype}
