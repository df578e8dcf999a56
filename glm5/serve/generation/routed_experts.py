"""The experts that computed the tokens of one prompt's answers, put together from what the engine's steps report."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glm5.config.model import ModelConfig
from glm5.engine.transport.wire import RoutedExperts
from glm5.serve.generation.job import Step


@dataclass
class ExpertRuns:
    """Runs of tokens, of the prompt and by answer. The prompt's experts are computed once, and come with the first
    answer."""

    num_prompt: int
    prompt: list[RoutedExperts] = field(default_factory=list)
    answers: dict[int, list[RoutedExperts]] = field(default_factory=dict)

    def take(self, step: Step) -> None:
        """Add a step's report, if it has one."""
        run = step.routed_experts
        if run is None:
            return
        if run.start < self.num_prompt - 1:
            self.prompt.append(run)
        self.answers.setdefault(step.index, []).append(run)

    def by_layer(self, index: int, num_answer: int, cfg: ModelConfig) -> NDArray[np.int32] | None:
        """int32 [tokens, layers, experts per token] of prompt and answer without the last token, which is never
        computed; 0 in dense layers, -1 for tokens that were not computed. None if there are no reports."""
        own = self.answers.get(index, [])
        if not self.prompt and not own:
            return None
        num_tokens = max(0, self.num_prompt + num_answer - 1)
        sparse = [layer_idx for layer_idx in range(cfg.num_hidden_layers) if cfg.is_moe(layer_idx)]
        shape = (num_tokens, cfg.num_hidden_layers, (self.prompt or own)[0].shape[2])
        experts = np.zeros(shape, dtype="<i4")
        experts[:, sparse] = -1
        # What comes after the prompt in the first answer's report is that answer's own.
        for runs, end in ((self.prompt, self.num_prompt - 1), (own, num_tokens)):
            for run in runs:
                rows = np.frombuffer(run.experts, dtype="<i2").reshape(run.shape)[: max(0, end - run.start)]
                experts[run.start : run.start + len(rows), sparse] = rows
        return experts
