"""What is trained when. Measured on one thread; docs/log.md says what was tried and did not work."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from glm5.train.data.questions import NUM_WORDS, Size

Stage = Literal["dense", "warmup", "sparse"]


@dataclass(frozen=True)
class Mixture:
    """How many conversations of each kind a step trains on."""

    counts: Mapping[str, int]
    until: float
    """Share of the run at which the next mixture takes over."""


@dataclass(frozen=True)
class Recipe:
    """One training run. Shares are of `num_steps`, rates of AdamW unless said otherwise."""

    num_steps: int = 600
    mixtures: tuple[Mixture, ...] = (
        Mixture({"copy": 6, "sort": 4, "think": 4, "recall": 5, "tool": 1}, 0.25),
        Mixture({"copy": 2, "sort": 4, "think": 4, "recall": 5, "tool": 3}, 1.0),
    )
    turns: Mapping[str, int] = field(default_factory=lambda: {"recall": 5, "tool": 2})
    min_words: int = 8
    max_words: int = NUM_WORDS
    full_words: float = 0.5
    """Share of the run at which recall contexts reach their full length."""
    warmup_from: float = 0.55
    """Until here attention is dense and neither the indexer nor the MTP layer learns."""
    sparse_from: float = 0.72
    """From here attention reads only what the indexer selects."""
    learning_rate: float = 3e-3
    matrix_lr: float = 2.5
    """Rate of Muon, relative to learning_rate."""
    embedding_lr: float = 10.0
    """Rate of the embedding, relative to learning_rate."""
    lr_warmup_steps: int = 30
    decay_from: float = 0.4
    """Share of the run at which the rate begins to fall."""
    final_lr: float = 0.05
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    mtp_weight: float = 0.3
    max_grad_norm: float = 1.0
    bias_step: float = 1e-3
    """Step of the router's selection bias towards an even load."""
    embedding_std: float = 0.7
    residual_scale: float = 0.4
    """Initial scale of what a layer adds to the residual stream."""

    def stage(self, step: int) -> Stage:
        share = step / self.num_steps
        return "dense" if share < self.warmup_from else "warmup" if share < self.sparse_from else "sparse"

    def lr(self, step: int) -> float:
        """Linear warm-up, a plateau, then linear decay to `final_lr` of the peak."""
        warm = min(1.0, (step + 1) / self.lr_warmup_steps)
        left = min(1.0, (1 - step / self.num_steps) / (1 - self.decay_from))
        return self.learning_rate * warm * (self.final_lr + (1 - self.final_lr) * left)

    def plan(self, seed: int, step: int) -> list[tuple[str, int, Size]]:
        """(kind, index, size) of each conversation of a step."""
        share = step / self.num_steps
        counts = next(mixture.counts for mixture in self.mixtures if share < mixture.until)
        longest = max(2 * self.min_words, self.max_words * min(1.0, share / self.full_words))
        planned: list[tuple[str, int, Size]] = []
        for kind, count in counts.items():
            for i in range(count):
                index = step * 1000 + i
                # Short contexts stay in the mixture to the end: they are what the long ones are learnt from.
                stretch = Random(f"{seed} {kind} {index}").random()
                words = round(self.min_words * (longest / self.min_words) ** stretch)
                planned.append((kind, index, Size(self.turns.get(kind, 1), words)))
        return planned
