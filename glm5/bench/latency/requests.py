"""Sends requests to an engine and records when their tokens arrive."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glm5.common.errors import GlmError
from glm5.engine.frontend.client import Request
from glm5.engine.frontend.output_stream import OutputStream
from glm5.engine.frontend.outputs import Delta
from glm5.engine.frontend.request_builder import Options
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams

_POLL_SECONDS = 0.1


@dataclass
class TokenTimes:
    """Arrivals of one request's tokens: the time and number of tokens of each step, in seconds of one clock. `experts`:
    of the last token, [MoE layers, A], if requested."""

    sent: float
    at: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    experts: NDArray[np.int16] | None = None

    def add(self, delta: Delta) -> None:
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
    until: Callable[[list[TokenTimes]], bool] = lambda _times: False,
) -> list[TokenTimes]:
    """Send all prompts at once, decoded greedily, and collect tokens until all have finished or `until` returns
    True."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    options = Options(num_speculative_tokens=None if drafts else 0, routed_experts=routed)
    times: list[TokenTimes] = []
    requests: list[Request] = []
    failed: list[GlmError] = []

    def deliver_to(one: TokenTimes) -> Callable[[Request, OutputStream | GlmError], None]:
        def deliver(_request: Request, item: OutputStream | GlmError) -> None:
            if isinstance(item, GlmError):
                failed.append(item)
                return
            for delta in item.take():
                one.add(delta)

        return deliver

    try:
        for prompt in prompts:
            times.append(TokenTimes(time.monotonic()))
            requests.append(llm.client.submit(prompt, params, options, deliver_to(times[-1])))
        while llm.client.num_unfinished and not failed and not (times[-1].at and until(times)):
            llm.client.pump(_POLL_SECONDS)
    finally:
        for request in requests:
            llm.client.abort(request)
    if failed:
        raise failed[0]
    llm.stats()  # returns after aborted requests have left the engine
    return times
