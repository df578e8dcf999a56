"""The policy as rollouts see it: tokens in, sampled tokens with their log-probabilities and weight versions out."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from glm5.common.errors import EngineDead
from glm5.config.rl import Rollouts
from glm5.engine import Delta, SamplingParams
from glm5.engine.sampling.params import MAX_N, answer_seeds
from glm5.rl.rollouts.engines import Engines
from glm5.rl.segments import Segment, seed_of

_ROUNDING = 1e-3
"""By which a log-probability may lie above 0."""
_INTERVAL = 32
"""Tokens of an answer that an engine which ends may take with it, where there are others to go on."""


@dataclass
class Sampled(Segment):
    """A reply, without a parent; its last token is the one that ended it. `is_truncated`: the tokens ran out before its
    end. `has_ended`: it is all there."""

    token_ids: list[int] = field(default_factory=list[int])
    is_sampled: bool = True
    is_truncated: bool = False
    has_ended: bool = False


class Policy:
    """Samples replies from engines, as the recipe's `[rollouts]` say. Raises EngineDead where none is left.

    `sampling`: how replies are drawn, by the names of a rollout's fields.

    `key`: of the group that asks, which has one engine (`Engines.held`). Where that ends, its answers go on elsewhere
    after the tokens that it has given, with seeds of their own. `keeps_pages`: a group is a session of the engine,
    whose pages outlive pushes.
    """

    def __init__(self, engines: Engines, cfg: Rollouts, *, greedy: bool = False, keeps_pages: bool = False) -> None:
        self.engines, self.cfg, self.keeps_pages = engines, cfg, keeps_pages
        cuts = {} if greedy else {"top_p": cfg.top_p, "top_k": cfg.top_k, "min_p": cfg.min_p}
        temperature = 0.0 if greedy else cfg.temperature
        self.params = SamplingParams(
            temperature=temperature,
            logprobs=0,
            detokenize=False,
            output_kind="FINAL_ONLY" if engines.count == 1 else "DELTA",
            **cuts,
        )
        names = ("temperature", "top_p", "top_k", "min_p")
        self.sampling: dict[str, Any] = {name: getattr(self.params, name) for name in names}

    def room(self, num_prompt: int) -> int:
        """The most tokens of a reply to a prompt of that length; below 1 where the context is full."""
        return min(self.cfg.max_tokens, self.cfg.max_model_len - num_prompt)

    async def replies(
        self, prompt_ids: Sequence[int], seed: int, count: int, key: int
    ) -> AsyncIterator[tuple[int, int, Sampled]]:
        """`count` replies to one prompt, which is computed once: (index, seed, reply) as each ends."""
        for first in range(0, count, MAX_N):
            n = min(MAX_N, count - first)
            seeds = answer_seeds(seed + first, n)
            async for index, sampled in self._sample(prompt_ids, seed + first, n, key):
                yield first + index, seeds[index], sampled

    async def reply(self, prompt_ids: Sequence[int], seed: int, key: int) -> Sampled:
        """A reply."""
        found = [sampled async for _, sampled in self._sample(prompt_ids, seed, 1, key)]
        return found[0]

    async def _sample(
        self, prompt_ids: Sequence[int], seed: int, n: int, key: int
    ) -> AsyncIterator[tuple[int, Sampled]]:
        answers = [Sampled() for _ in range(n)]
        async for index in self._draw(prompt_ids, answers, seed, key):
            yield index, answers[index]
        if rest := [index for index, answer in enumerate(answers) if not answer.has_ended]:
            seeds = answer_seeds(seed, n)
            going = [self._go_on(prompt_ids, answers[index], seeds[index], key) for index in rest]
            for index, sampled in zip(rest, await asyncio.gather(*going), strict=True):
                yield index, sampled

    async def _go_on(self, prompt_ids: Sequence[int], answer: Sampled, seed: int, key: int) -> Sampled:
        """The rest of an answer whose engine ended."""
        while not answer.has_ended:
            given, own_seed = [*prompt_ids, *answer.token_ids], seed_of(seed, len(answer.token_ids))
            async for _ in self._draw(given, [answer], own_seed, key):
                pass
        return answer

    async def _draw(
        self, prompt_ids: Sequence[int], answers: Sequence[Sampled], seed: int, key: int
    ) -> AsyncIterator[int]:
        """Add to the answers, by one request; the index of each as it ends. `prompt_ids` end with what an only answer
        has already. Where the engine ends first and there is another one, answers are left without an end."""
        left = min(self.room(len(prompt_ids)), self.cfg.max_tokens - len(answers[0].token_ids))
        params = self.params.but(seed=seed, n=len(answers), max_tokens=left)
        options: dict[str, Any] = {"sampling_mask": params.truncates, "stream_interval": _INTERVAL}
        if self.keeps_pages:
            options |= {"cache_salt": str(key), "keeps_pages": True}
        engine = self.engines.of(key)
        try:
            async with engine.generate(prompt_ids, params, **options) as deltas:
                async for delta in deltas:
                    if (reason := _nonsense(delta, engine.info.vocab_size)) is not None:
                        engine.kill(reason)
                        raise EngineDead(reason)
                    answer = answers[delta.index]
                    answer.add(delta)
                    if (routed := delta.routed_experts) is not None:
                        rows = np.frombuffer(routed.experts, dtype="<i2").reshape(routed.shape)
                        answer.experts = rows if answer.experts is None else np.concatenate([answer.experts, rows])
                    if delta.finish_reason is not None:
                        answer.is_truncated, answer.has_ended = delta.finish_reason == "length", True
                        yield delta.index
        except EngineDead:
            if self.engines.stopped_because is not None:
                raise


def _nonsense(delta: Delta, vocab_size: int) -> str | None:
    """Why what an engine has sent cannot have been sampled, if so: it is out of order then, and nothing of it may be
    trained."""
    ids, logprobs = delta.token_ids, delta.tempered_logprobs
    if len(ids) != len(logprobs):
        return f"it answered {len(logprobs)} log-probabilities for {len(ids)} tokens"
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size and max(logprobs) <= _ROUNDING and isfinite(sum(logprobs))):
        return f"it answered tokens {min(ids)} to {max(ids)} with log-probabilities {logprobs[:4]}"
    return None
