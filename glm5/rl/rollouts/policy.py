"""The policy as rollouts see it: tokens in, sampled tokens with their log-probabilities and weight versions out."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from glm5.config.rl import Rollouts
from glm5.engine import AsyncEngine, SamplingParams
from glm5.engine.sampling.params import MAX_N, answer_seeds
from glm5.rl.segments import Experts, Segment


@dataclass
class Sampled:
    """A reply: its tokens with the one that ended it, log-probabilities of the distribution that they were drawn from,
    and the version of the weights of each. `is_truncated`: the tokens ran out before its end. `kept`: where sampling
    leaves tokens out, the mask of those that each was drawn from (`kept_ids`)."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    is_truncated: bool = False
    experts: Experts | None = None
    kept: list[bytes] = field(default_factory=list[bytes])

    def segment(self, parent: int | None) -> Segment:
        tokens = self.token_ids, parent, True, self.logprobs, self.versions
        return Segment(*tokens, experts=self.experts, kept=self.kept or None)


class Policy:
    """Samples replies from an engine, as the recipe's `[rollouts]` say. Raises EngineDead, as the engine does."""

    def __init__(self, engine: AsyncEngine, cfg: Rollouts, *, greedy: bool = False) -> None:
        self.engine, self.cfg = engine, cfg
        cuts = {} if greedy else {"top_p": cfg.top_p, "top_k": cfg.top_k, "min_p": cfg.min_p}
        temperature = 0.0 if greedy else cfg.temperature
        self.params = SamplingParams(
            temperature=temperature, logprobs=0, detokenize=False, output_kind="FINAL_ONLY", **cuts
        )

    @property
    def sampling(self) -> dict[str, Any]:
        """How replies are drawn, by the names of a rollout's fields."""
        return {name: getattr(self.params, name) for name in ("temperature", "top_p", "top_k", "min_p")}

    def room(self, num_prompt: int) -> int:
        """The most tokens of a reply to a prompt of that length; below 1 where the context is full."""
        return min(self.cfg.max_tokens, self.cfg.max_model_len - num_prompt)

    async def replies(
        self, prompt_ids: Sequence[int], seed: int, count: int
    ) -> AsyncIterator[tuple[int, int, Sampled]]:
        """`count` replies to one prompt, which is computed once: (index, seed, reply) as each ends."""
        for first in range(0, count, MAX_N):
            n = min(MAX_N, count - first)
            seeds = answer_seeds(seed + first, n)
            async for index, sampled in self._sample(prompt_ids, seed + first, n):
                yield first + index, seeds[index], sampled

    async def reply(self, prompt_ids: Sequence[int], seed: int) -> Sampled:
        """A reply."""
        found = [sampled async for _, sampled in self._sample(prompt_ids, seed, 1)]
        return found[0]

    async def _sample(self, prompt_ids: Sequence[int], seed: int, n: int) -> AsyncIterator[tuple[int, Sampled]]:
        params = self.params.but(seed=seed, n=n, max_tokens=self.room(len(prompt_ids)))
        answers = [Sampled() for _ in range(n)]
        async with self.engine.generate(prompt_ids, params, sampling_mask=params.truncates) as deltas:
            async for delta in deltas:
                answer = answers[delta.index]
                answer.token_ids += delta.token_ids
                answer.logprobs += delta.tempered_logprobs
                answer.versions += [delta.version] * len(delta.token_ids)
                answer.kept += delta.sampling_mask
                if (routed := delta.routed_experts) is not None:
                    rows = np.frombuffer(routed.experts, dtype="<i2").reshape(routed.shape)
                    answer.experts = rows if answer.experts is None else np.concatenate([answer.experts, rows])
                if delta.finish_reason is not None:
                    answer.is_truncated = delta.finish_reason == "length"
                    yield delta.index, answer
