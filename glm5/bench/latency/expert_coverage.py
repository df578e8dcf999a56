"""Whether tokens visit experts as evenly as random weights should have them do.

n tokens that choose A of E experts, each choice as likely as any other, visit E (1 - (1 - A/E)^n) of them. Weights that
make every token choose the same few would be read less, and steps would look faster than they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from glm5.common.errors import GlmError
from glm5.config.model import ModelConfig

# Of the expected number, as a mean over layers; a router of GLM-5's sizes and random weights has 0.97 to 1.03.
LEAST = 0.9
_DEVIATIONS = 3  # that chance may add where layers and experts are few


@dataclass(frozen=True)
class ExpertCoverage:
    """Distinct experts of a step of `num_tokens`, over MoE layers, how many were to be expected, and the smallest mean
    that is believable."""

    num_tokens: int
    fewest: int
    mean: float
    most: int
    expected: float
    least: float

    def __str__(self) -> str:
        return f"{self.fewest} to {self.most}, mean {self.mean:.1f} of {self.expected:.1f} expected"


def expected_experts(cfg: ModelConfig, num_tokens: int) -> float:
    """Distinct experts that tokens visit if every choice is as likely as any other."""
    num_experts = cfg.n_routed_experts
    return num_experts * (1 - (1 - cfg.num_experts_per_tok / num_experts) ** num_tokens)


def coverage_of(cfg: ModelConfig, expert_TLA: Sequence[NDArray[np.int16]]) -> ExpertCoverage:
    """Of tokens' experts, each [MoE layers, A]."""
    counts = [len(np.unique(layer_TA)) for layer_TA in np.stack(expert_TLA, axis=1)]
    num_tokens, expected = len(expert_TLA), expected_experts(cfg, len(expert_TLA))
    # Were experts visited independently of one another; they are a little less scattered than that.
    deviation = sqrt(expected * (1 - expected / cfg.n_routed_experts) / len(counts))
    least = LEAST * expected - _DEVIATIONS * deviation
    return ExpertCoverage(num_tokens, min(counts), float(np.mean(counts)), max(counts), expected, least)


def check(spreads: Sequence[ExpertCoverage]) -> None:
    """GlmError where tokens went to fewer experts than is believable: such figures are not to be reported."""
    for spread in spreads:
        if spread.mean < spread.least:
            raise GlmError(
                f"routing did not spread: of {spread.num_tokens} tokens, experts a layer: {spread}; allowed: a mean of "
                f"at least {spread.least:.1f}. Steps would look faster than they are, so nothing is reported"
            )
