"""Checks that tokens visit experts about uniformly, as they should with random weights.

n tokens that choose A of E experts uniformly visit E (1 - (1 - A/E)^n) distinct ones. If all tokens chose the same few
experts, fewer weights would be read, and steps would look faster than they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from glm5.common.errors import GlmError
from glm5.config.model import ModelConfig

# Minimum share of the expected number, as a mean over layers. Random routers of GLM-5's sizes have 0.97 to 1.03.
LEAST = 0.9
_DEVIATIONS = 3  # standard deviations of tolerance, which matter if layers and experts are few


@dataclass(frozen=True)
class ExpertCoverage:
    """Distinct experts of a step of `num_tokens` (over MoE layers), their expected number, and the smallest plausible
    mean."""

    num_tokens: int
    fewest: int
    mean: float
    most: int
    expected: float
    least: float

    def __str__(self) -> str:
        return f"{self.fewest} to {self.most}, mean {self.mean:.1f} of {self.expected:.1f} expected"


def expected_experts(cfg: ModelConfig, num_tokens: int) -> float:
    """The expected number of distinct experts under uniform routing."""
    num_experts = cfg.n_routed_experts
    return num_experts * (1 - (1 - cfg.num_experts_per_tok / num_experts) ** num_tokens)


def coverage_of(cfg: ModelConfig, expert_TLA: Sequence[NDArray[np.int16]]) -> ExpertCoverage:
    """Coverage of the experts of tokens, each [MoE layers, A]."""
    counts = [len(np.unique(layer_TA)) for layer_TA in np.stack(expert_TLA, axis=1)]
    num_tokens, expected = len(expert_TLA), expected_experts(cfg, len(expert_TLA))
    # An upper bound: it assumes that experts are visited independently of one another.
    deviation = sqrt(expected * (1 - expected / cfg.n_routed_experts) / len(counts))
    least = LEAST * expected - _DEVIATIONS * deviation
    return ExpertCoverage(num_tokens, min(counts), float(np.mean(counts)), max(counts), expected, least)


def check(coverages: Sequence[ExpertCoverage]) -> None:
    """Raises GlmError if tokens visited fewer experts than is plausible."""
    for coverage in coverages:
        if coverage.mean < coverage.least:
            raise GlmError(
                f"routing did not spread: of {coverage.num_tokens} tokens, experts a layer: {coverage}; allowed: a "
                f"mean of at least {coverage.least:.1f}. Steps would look faster than they are, so nothing is reported"
            )
