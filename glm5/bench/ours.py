"""This engine's side of a comparison, through `LLM`."""

import time
from collections.abc import Sequence
from typing import Any

from glm5.bench.run import Answer, Run
from glm5.bench.workload import Job
from glm5.common.progress import Progress
from glm5.engine.frontend.outputs import RequestOutput
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams


def run_at_once(llm: LLM, jobs: Sequence[Job]) -> Run:
    """Send all requests at the start, with an empty prefix cache."""
    llm.reset_prefix_cache()
    start = time.monotonic()
    outputs = _generate(llm, jobs, use_tqdm=True)
    answers = [_answer(output, start) for output in outputs]
    return Run(answers, max(answer.last for answer in answers) - start)


def run_in_turn(llm: LLM, jobs: Sequence[Job]) -> Run:
    """Send each request when the one before it has finished."""
    llm.reset_prefix_cache()
    answers: list[Answer] = []
    with Progress(total=len(jobs), unit="answer", desc="ours") as progress:
        for job in jobs:
            start = time.monotonic()
            answers += [_answer(output, start) for output in _generate(llm, [job], use_tqdm=False)]
            progress.update(1)
    return Run(answers, sum(answer.last - answer.sent for answer in answers))


def _generate(llm: LLM, jobs: Sequence[Job], *, use_tqdm: bool) -> list[RequestOutput]:
    params = [SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True) for job in jobs]
    return llm.generate([list(job.prompt_ids) for job in jobs], params, use_tqdm=use_tqdm)


def _answer(output: RequestOutput, sent: float) -> Answer:
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None and metrics.last_token_time is not None  # noqa: PT018
    return Answer(tuple(output.outputs[0].token_ids), sent, metrics.first_token_time, metrics.last_token_time)


class Drafts:
    """Statistics of drafts since its creation, from the engine's counters."""

    def __init__(self, llm: LLM):
        self._llm, self._before = llm, llm.stats()["speculation"]

    def metrics(self, num_tokens: int) -> dict[str, Any]:
        """For JSON. `num_tokens`: output tokens since creation. A rate is None if nothing was drafted at its
        position."""
        config, now = self._llm.config, self._llm.stats()["speculation"]
        counts = [_gained(now[name], self._before[name]) for name in ("drafted", "accepted")]
        rates = [good / made if made else None for made, good in zip(*counts, strict=True)]
        num_accepted = min(sum(counts[1]), num_tokens - 1)
        return {
            "on": self._llm.client.info.max_depth > 0,
            "max_depth": self._llm.client.info.max_depth,
            "adaptive": config.adaptive_speculation,
            "accepted_by_position": rates,
            "tokens_per_step": num_tokens / (num_tokens - num_accepted),
        }


def _gained(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip(before, now, strict=True)]
