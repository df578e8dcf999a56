"""The learning rate and the batch size of each step of a stage.

    lr(s) = peak (s + 1) / warmup                                   while s < warmup
            final + (peak - final) (1 + cos(pi x)) / 2,  x in 0..1   cosine; (1 - x) in place of the fraction: linear

Both depend only on the step.
"""

import math
from itertools import accumulate

from glm5.config.train import StageConfig

FINAL_LR = 0.2
"""Default final rate as a share of the peak: 2e-4 to 4e-5 in pre-training (GLM-5 report, appendix A)."""


class Schedule:
    """The schedule of one stage."""

    def __init__(self, stage: StageConfig) -> None:
        self.stage = stage
        self.final = stage.lr * FINAL_LR if stage.final_lr is None else stage.final_lr
        first = stage.sequences if stage.first_sequences is None else stage.first_sequences
        grown = stage.growing_steps
        sizes = (first + (stage.sequences - first) * step // max(grown, 1) for step in range(grown))
        self._before = list(accumulate(sizes, initial=0))  # sequences before each step of the growing part

    def lr(self, step: int) -> float:
        stage = self.stage
        if step < stage.lr_warmup_steps:
            return stage.lr * (step + 1) / stage.lr_warmup_steps
        if stage.shape == "constant":
            return stage.lr
        x = (step - stage.lr_warmup_steps) / max(1, stage.steps - 1 - stage.lr_warmup_steps)
        left = 1 - x if stage.shape == "linear" else (1 + math.cos(math.pi * x)) / 2
        return self.final + (stage.lr - self.final) * left

    def draws(self, step: int) -> range:
        """Indices of the rows that a step trains on."""
        return range(self._first(step), self._first(step + 1))

    def _first(self, step: int) -> int:
        grown = len(self._before) - 1
        return self._before[step] if step <= grown else self._before[-1] + (step - grown) * self.stage.sequences
