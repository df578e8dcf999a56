"""One run of a workload by either side, and its statistics.

    tokens/s   requested tokens / seconds from the first request sent to the last token
    TTFT       from when a request was sent to its first token
    TPOT       from the first token of an answer to its last, for each token after the first

Percentiles interpolate linearly between ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Answer:
    """Token ids, and the times of sending, first token and last token, in seconds of one clock."""

    token_ids: tuple[int, ...]
    sent: float
    first: float
    last: float

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        """Seconds; answers of the workload have more than one token."""
        return (self.last - self.first) / (len(self.token_ids) - 1)


@dataclass(frozen=True)
class Run:
    """Answers in the order of the workload's jobs, and the seconds in which they were computed."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def metrics(self) -> dict[str, Any]:
        """For JSON; times are in milliseconds."""
        out: dict[str, Any] = {
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "output_tokens": self.num_tokens,
        }
        for name in ("ttft", "tpot"):
            values = np.array([getattr(answer, name) for answer in self.answers]) * 1000
            out[f"{name}_ms"] = float(values.mean())
            for percent in (50, 99):
                out[f"p{percent}_{name}_ms"] = float(np.percentile(values, percent))
        return out


def fastest(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda run: run.seconds)


def num_equal(ours: Run, theirs: Run) -> int:
    """Answers that are the same token by token."""
    pairs = zip(ours.answers, theirs.answers, strict=True)
    return sum(our.token_ids == their.token_ids for our, their in pairs)
