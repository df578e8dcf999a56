"""`glm5 bench throughput` and `latency`: this engine and the peer alternate, and the fastest run of each counts.

On a CPU, the peer runs with each number of threads in the first round, and with the best number in later ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Protocol

import torch

from glm5.bench.ours import Drafts, run_at_once, run_in_turn
from glm5.bench.run import Run, fastest
from glm5.bench.workload import LONGEST, WARM_UP, Job, draw_jobs
from glm5.common.cores import usable_cores
from glm5.common.errors import ConfigError
from glm5.config.bench import BenchConfig, ThroughputConfig
from glm5.engine.llm import LLM

RunPeer = Callable[[Sequence[Job], str, float], Run | None]


class PeerProtocol(Protocol):
    """The interface of `glm5.bench.peer.Peer`."""

    name: str

    @property
    def on_cpu(self) -> bool: ...

    def warm_up(self, jobs: Sequence[Job]) -> None: ...

    def run_at_once(self, jobs: Sequence[Job], note: str = "", limit: float = inf) -> Run | None: ...

    def run_in_turn(self, jobs: Sequence[Job], note: str = "", limit: float = inf) -> Run | None: ...


@dataclass
class Measured:
    """Runs of both sides. `peer_runs`: by number of threads (0: not on a CPU), empty if the run was stopped for being
    slower than with another number. `drafts`: as in `ours.Drafts`."""

    jobs: Sequence[Job]
    our_runs: list[Run] = field(default_factory=list[Run])
    peer_runs: dict[int, list[Run]] = field(default_factory=dict[int, list[Run]])
    drafts: dict[str, Any] = field(default_factory=dict[str, Any])
    peer_name: str | None = None

    @property
    def ours(self) -> Run:
        return fastest(self.our_runs)

    @property
    def peer(self) -> Run | None:
        return fastest(self.peer_runs[self.peer_threads]) if self.peer_runs else None

    @property
    def peer_threads(self) -> int:
        """The best number of threads."""
        finished = [number for number, runs in self.peer_runs.items() if runs]
        return min(finished, key=lambda number: fastest(self.peer_runs[number]).seconds)

    @property
    def ratio(self) -> float | None:
        """Our tokens a second over the peer's."""
        return None if self.peer is None else self.ours.tokens_per_second / self.peer.tokens_per_second


def measure(settings: BenchConfig, llm: LLM, peer: PeerProtocol | None) -> Measured:
    """Raises ConfigError where the engine's context is too short for the workload."""
    if llm.max_model_len < LONGEST:
        raise ConfigError(f"the workload needs a context of {LONGEST} tokens, this engine has {llm.max_model_len}")
    draw = partial(draw_jobs, token_ids=ordinary_ids(llm))
    at_once = isinstance(settings, ThroughputConfig)
    measured = Measured(draw(settings.num_prompts, settings.seed), peer_name=peer.name if peer is not None else None)
    warm_up = draw(1, settings.seed + WARM_UP)
    run_in_turn(llm, warm_up)
    drafts = Drafts(llm)
    for _ in range(settings.num_iters):
        measured.our_runs.append((run_at_once if at_once else run_in_turn)(llm, measured.jobs))
        if peer is not None:
            run_peer(peer, measured, peer.run_at_once if at_once else peer.run_in_turn, warm_up)
    measured.drafts = drafts.metrics(sum(run.num_tokens for run in measured.our_runs))
    return measured


def run_peer(peer: PeerProtocol, measured: Measured, run: RunPeer, warm_up: Sequence[Job]) -> None:
    """One round of the peer: with every number of threads in the first one, then with the best."""
    if not peer.on_cpu:
        unlimited = run(measured.jobs, "", inf)
        assert unlimited is not None, "a run without a limit was stopped"
        measured.peer_runs.setdefault(0, []).append(unlimited)
        return
    before, is_first = torch.get_num_threads(), not measured.peer_runs
    try:
        for number in thread_counts() if is_first else [measured.peer_threads]:
            torch.set_num_threads(number)
            peer.warm_up(warm_up)
            best = measured.peer.seconds if is_first and measured.peer is not None else inf
            found = run(measured.jobs, f", {number} thread{'s' * (number > 1)}", best)
            measured.peer_runs.setdefault(number, []).extend([] if found is None else [found])
    finally:
        torch.set_num_threads(before)


def thread_counts() -> list[int]:
    """Numbers of threads that may be best: one, two, half of the cores, all."""
    cores = usable_cores()
    return sorted({min(number, cores) for number in (1, 2, max(1, cores // 2), cores)})


def ordinary_ids(llm: LLM) -> Sequence[int]:
    """Token ids of text, without special tokens."""
    every = range(llm.cfg.vocab_size)
    if (tokenizer := llm.tokenizer) is None:
        return every
    known = min(tokenizer.vocab_size, len(every))
    return [token_id for token_id in range(known) if tokenizer.bytes_unless_special(token_id)]
