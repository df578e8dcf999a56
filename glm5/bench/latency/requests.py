"""Requests to an engine, and when it was heard of each of their tokens."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glm5.common.errors import GlmError
from glm5.engine.frontend.client import Request
from glm5.engine.frontend.outputs import Delta
from glm5.engine.frontend.request_builder import Options
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams

_POLL_SECONDS = 0.1


@dataclass
class TokenTimes:
    """What came of one request: for each step that gained it tokens, when it was heard of and how many. Seconds of one
    clock. `experts`: of the last token, [MoE layers, A], where they were asked for."""

    sent: float
    at: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    experts: NDArray[np.int16] | None = None

    def hear(self, delta: Delta) -> None:
        if delta.token_ids:
            self.at.append(time.monotonic())
            self.tokens.append(len(delta.token_ids))
        if (routed := delta.routed_experts) is not None:
            self.experts = np.frombuffer(routed.experts, dtype="<i2").reshape(routed.shape)[-1]


def ask(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    drafts: bool = False,
    routed: bool = False,
    until: Callable[[list[TokenTimes]], bool] = lambda _heard: False,
) -> list[TokenTimes]:
    """Send all at once, greedy, and listen until all are answered or `until` says that enough was heard."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    options = Options(num_speculative_tokens=None if drafts else 0, routed_experts=routed)
    heard: list[TokenTimes] = []
    requests: list[Request] = []
    failed: list[GlmError] = []

    def deliver_to(one: TokenTimes) -> Callable[[Request, Delta | GlmError], None]:
        return lambda _request, item: failed.append(item) if isinstance(item, GlmError) else one.hear(item)

    try:
        for prompt in prompts:
            heard.append(TokenTimes(time.monotonic()))
            requests.append(llm.client.submit(prompt, params, options, deliver_to(heard[-1])))
        while llm.client.num_unfinished and not failed and not (heard[-1].at and until(heard)):
            llm.client.pump(_POLL_SECONDS)
    finally:
        for request in requests:
            llm.client.abort(request)
    if failed:
        raise failed[0]
    llm.stats()  # answered when what was aborted has left
    return heard
