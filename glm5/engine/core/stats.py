"""Counters since the engine's start, and the answer to `StatsCall`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.engine.scheduler.plan import Item, Output, StepPlan
from glm5.engine.scheduler.scheduler import Scheduler
from glm5.kernels.kernel_count import built_late


@dataclass
class Counters:
    """`steps`: those with rows, `rows` their total. `sampled`: tokens sent to clients.

    `drafted` and `accepted` count by draft position. `missed_at[b]`: admissions whose cached prefix ends at a position
    of b bits. `preempted`: number of preemptions. `prefilled` and `prefill_us`: tokens of prompts that were computed,
    and the time of steps with such tokens. `decode_moments`: of the other steps, by which SGLang's routers predict how
    long a step takes: their number, and the sums of sequences, microseconds, sequences squared, sequences times
    microseconds, and tokens.
    """

    max_depth: int
    requests: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    steps: int = 0
    rows: int = 0
    sampled: int = 0
    preempted: int = 0
    prefilled: int = 0
    prefill_us: int = 0
    decode_moments: list[int] = field(default_factory=lambda: [0] * 6)
    missed_at: dict[int, int] = field(default_factory=dict[int, int])
    drafted: list[int] = field(default_factory=list[int])
    accepted: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.drafted, self.accepted = [0] * self.max_depth, [0] * self.max_depth

    def count_plan(self, plan: StepPlan) -> None:
        self.preempted += len(plan.preempted)
        for entered in plan.entered:
            if entered.donor_slot is None:
                bits = (entered.hit_device + entered.hit_lower).bit_length()
                self.missed_at[bits] = self.missed_at.get(bits, 0) + 1
        if plan.items:
            self.steps += 1
            self.rows += plan.num_tokens

    def count_step(self, items: Sequence[Item], num_tokens: int, seconds: float) -> None:
        """Count a step that was read; `num_tokens` were sampled."""
        micros, num_seqs, prefilled = int(seconds * 1e6), len(items), 0
        for item in reversed(items):
            if item.kind != "prefill":
                break
            prefilled += item.num_rows
        if prefilled:
            self.prefilled += prefilled
            self.prefill_us += micros
            return
        gained = (1, num_seqs, micros, num_seqs * num_seqs, num_seqs * micros, num_tokens)
        self.decode_moments = [total + more for total, more in zip(self.decode_moments, gained, strict=True)]

    def count_drafts(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        for position, (drafted, accepted) in enumerate(zip(num_drafted, num_accepted, strict=True)):
            self.drafted[position] += drafted
            self.accepted[position] += accepted

    def count_output(self, output: Output) -> None:
        self.sampled += len(output.token_ids)
        if output.reason is not None:
            self.finished[output.reason] += 1


def stats(
    counters: Counters,
    scheduler: Scheduler,
    *,
    num_held: int,
    tiers: dict[str, int] | None,
    is_sleeping: bool,
    is_torn: bool,
    last_push: dict[str, float] | None,
    simulated_acceptance: float | None,
) -> dict[str, Any]:
    """All figures, as JSON. `num_held`: answers that wait for a grammar or lookup before they reach the scheduler."""
    pool, found = scheduler.page_manager.pool, scheduler.stats
    num_running = len(scheduler.prompting) + len(scheduler.decoding)
    size, waiting = scheduler.config.page_size, scheduler.waiting
    uncached = sum(len(seq.tokens) - size * len(seq.path) for seq in waiting)
    return {
        "requests": counters.requests,
        "finished": dict(counters.finished),
        "waiting": len(scheduler.live) - num_running + num_held,
        "held": num_held,
        "retracted": sum(seq.was_admitted for seq in waiting),
        "waiting_tokens": sum(len(seq.tokens) for seq in waiting),
        "uncached_tokens": uncached + sum(seq.goal - seq.computed for seq in scheduler.prompting),
        "prompting": len(scheduler.prompting),
        "decoding": len(scheduler.decoding),
        "steps": counters.steps,
        "rows": counters.rows,
        "sampled_tokens": counters.sampled,
        "prefill": {"tokens": counters.prefilled, "busy_us": counters.prefill_us},
        "decode_moments": list(counters.decode_moments),
        "preemptions": counters.preempted,
        "kernels_built_late": built_late(),
        "pages": {"all": pool.num_pages, "in_use": pool.num_pages - pool.num_available, "idle": pool.num_idle},
        "prefix_cache": {
            "queries": found.queries,
            "query_tokens": found.query_tokens,
            "hit_tokens": dict(found.hit_tokens),
            "missed_tokens": found.missed_tokens,
            "again_tokens": found.again_tokens,
            "evicted_pages": found.evicted_pages,
            "missed_at_bits": {str(bits): counters.missed_at[bits] for bits in sorted(counters.missed_at)},
        },
        "speculation": {
            "depth": scheduler.depth,
            "drafted": list(counters.drafted),
            "accepted": list(counters.accepted),
            "simulated_acceptance": simulated_acceptance,
        },
        "tiers": tiers,
        "weight_version": scheduler.version,
        "is_paused": scheduler.is_paused,
        "is_sleeping": is_sleeping,
        "weights_are_torn": is_torn,
        "last_push": last_push,
    }
