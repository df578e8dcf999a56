"""An engine core over a model in memory, driven to the end of its requests: what every answer gained, in order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.config.engine import EngineConfig
from glm5.engine.build import build_core
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import AddRequest, TokenLogprobs, Update, Updates
from glm5.model.glm5 import Glm5
from tests.support.updates import updates_of

FLUSH_S = 30.0
# A turn computes a step, or waits for a copy or a grammar for a hundredth of a second.
MAX_TURNS = 10_000


@dataclass(frozen=True)
class Request:
    """One answer, to a prompt of token ids."""

    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: tuple[int, ...] = ()


@dataclass
class Outcome:
    """What an answer was: tokens, their log-probabilities, and those of its prompt where they were asked for."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None


class RealCore:
    """A core of `EngineConfig(**settings)`, with launch-ahead and without drafts unless the settings say otherwise.

    A context manager: leaving it ends the threads, and pages on their way to disk arrive.
    """

    def __init__(
        self, model: Glm5, source: Path | None = None, tokenizer: Tokenizer | None = None, **settings: Any
    ) -> None:
        defaults = {"num_speculative_tokens": 0, "adaptive_speculation": False, "async_scheduling": True}
        settings = defaults | {"max_model_len": 320} | settings
        self.core = build_core(model, EngineConfig(**settings), source=source, tokenizer=tokenizer)
        self._outcomes: list[Outcome] = []

    def __enter__(self) -> "RealCore":
        return self

    def __exit__(self, *_error: object) -> None:
        self.core.close(FLUSH_S)

    def answer(self, requests: Sequence[Request], urgent: Sequence[Request] = (), every: int = 6) -> list[Outcome]:
        """All of them at once, in this order; the cache stays warm.

        The `urgent` ones are asked for again in one turn of `every`, as long as there are others, and go before those;
        their outcomes come last.
        """
        requested = [self._ask(one) for one in requests]
        num_turns = 0
        while self.core.has_work:
            num_turns += 1
            assert num_turns < MAX_TURNS, f"no end in sight: {self.core.stats()}"
            others = requested[: len(requests)]
            if urgent and num_turns % every == 0 and any(self._outcomes[seq_id].reason is None for seq_id in others):
                requested += [self._ask(one, priority=-1) for one in urgent]
            for message in self.core.step():
                assert isinstance(message, Updates), message
                for update in updates_of(message):
                    self._hear(update)
        return [self._outcomes[seq_id] for seq_id in requested]

    def _ask(self, one: Request, priority: int = 0) -> int:
        seq_id = len(self._outcomes)
        self._outcomes.append(Outcome())
        self.core.receive(
            AddRequest(
                (seq_id,),
                one.prompt_ids,
                one.params,
                (one.seed,),
                one.max_tokens,
                stop_ids=one.stop_ids,
                priority=priority,
            )
        )
        return seq_id

    def _hear(self, update: Update) -> None:
        assert update.error is None, update.error
        outcome = self._outcomes[update.seq_id]
        assert outcome.reason is None, f"{update.seq_id} is over: {update}"
        outcome.token_ids += update.token_ids
        outcome.logprobs += update.logprobs or []
        outcome.prompt_logprobs += update.prompt_logprobs or []
        outcome.reason = update.finish_reason

    @property
    def hits(self) -> dict[str, int]:
        """Prompt tokens found in the cache, by tier."""
        return self.core.stats()["prefix_cache"]["hit_tokens"]

    @property
    def num_steps(self) -> int:
        return self.core.stats()["steps"]

    @property
    def num_preempted(self) -> int:
        return self.core.stats()["preemptions"]

    @property
    def tokens_per_step(self) -> float:
        """What a sequence gains in a decoding step: its own token and the drafts that stood."""
        stats = self.core.stats()["speculation"]
        return 1 + sum(stats["accepted"]) / stats["drafted"][0] if stats["drafted"] and stats["drafted"][0] else 1.0
