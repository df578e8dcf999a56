"""The policy in training: supervised warm-up, then a step for each batch of rollouts."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.config.rl import RLRecipe
from glm5.model.glm5 import Glm5
from glm5.rl.algorithms.table import preset_of
from glm5.rl.build import PolicyBuilder, threads_of
from glm5.rl.rollout import Group
from glm5.rl.shown import shown_examples
from glm5.rl.training.critic import Critic
from glm5.rl.training.exact import ExactPass
from glm5.rl.training.objective import Coefficients, RLObjective
from glm5.rl.training.packing import batches_of, pack
from glm5.rl.training.policy import choose_parameters, policy_step, with_logprobs
from glm5.rl.training.repair import Repairs, repair
from glm5.rl.training.scores import ScoreKeeper, Scores, number_tokens
from glm5.rl.training.sequences import TrainingSequence, divided, sequences_of_step
from glm5.train.batch import Batch
from glm5.train.loop import deterministic, torch_threads
from glm5.train.master_weights import MasterWeights

logger = logging.getLogger(__name__)


@contextmanager
def arithmetic(recipe: RLRecipe, device: torch.device) -> Iterator[None]:
    """Inside the block, torch computes as the recipe says: the number of threads, deterministic algorithms."""
    threads = threads_of(recipe, device) if device.type == "cpu" else None
    with torch_threads(threads), deterministic(enabled=recipe.rollouts.deterministic and device.type == "cuda"):
        yield


@dataclass(frozen=True)
class Trained:
    """A step: its losses by name, what became of the groups, and what was computed of each token."""

    metrics: dict[str, float]
    repairs: Repairs
    scores: Scores


class PolicyTrainer:
    """A model, its optimizer and the recipe's algorithm, on one device."""

    def __init__(self, recipe: RLRecipe, builder: PolicyBuilder, device: torch.device) -> None:
        self.recipe, self.builder, self.device = recipe, builder, device
        algorithm = recipe.algorithm
        self.preset = preset_of(algorithm.name, algorithm.parameters)
        self._scored = ScoreKeeper()
        self.objective = RLObjective(self.preset, on_scored=self._scored)
        self.model = builder.model(device)
        choose_parameters(self.model)
        compute = getattr(torch, recipe.model.compute or recipe.model.dtype)
        self.masters = None if compute == self.model.dtype else MasterWeights(self.model, compute)
        self.step = policy_step(
            self.model, self.objective, recipe.optimizer, self.masters, balance_step=recipe.balance_step
        )
        self.reference: Glm5 | None = None
        self.critic: Critic | None = None
        self.exact: ExactPass | None = None

    def warm_up(self) -> None:
        """Supervised steps on legal replies, if the recipe has some."""
        plan = self.recipe.warm_start
        if plan is None:
            return
        with shown_examples(self.recipe, self.builder.assets) as shown:
            for number in range(1, plan.steps + 1):
                examples = list(islice(shown, plan.conversations))
                packed = pack([ids for ids, _ in examples], self.recipe.pass_tokens)[0]
                batches = [_supervised([examples[i] for i in indices]).to(self.device) for indices in packed]
                losses = self.step.run(batches, plan.lr)
                if number % 20 == 0:
                    logger.info("warm start, step %d: cross-entropy %.4g", number, losses["ce"])

    def begin(self) -> None:
        """The first rollouts are about to be made: keep the reference, make the critic, begin with a new optimizer
        state, and compute in the engine's arithmetic from now on."""
        if self.recipe.algorithm.reference_kl:
            self.reference = self.builder.model(self.device).requires_grad_(requires_grad=False)
            self.reference.load_state_dict(self.model.state_dict())
        if self.preset.advantages is None:
            self.critic = Critic(self.recipe, self.builder.model(self.device), self.learnt())
        self.step.optimizers.reset()
        if self.recipe.exact:
            threads = threads_of(self.recipe, self.device) or torch.get_num_threads()
            self.exact = self.model.impl = ExactPass(self.model, threads=threads)
            self.objective.scorer = self.exact.logprobs

    def check(self, arithmetic: str | None) -> None:
        """ConfigError where an engine computes in another arithmetic than the exact pass."""
        if self.exact is not None:
            self.exact.check(arithmetic)

    def train(self, groups: Sequence[Group], step: int) -> Trained:
        """Train on the groups of a step. Raises TrainingError where none can be trained on."""
        self.objective.coefficients = Coefficients(self.recipe.algorithm.reference_kl, self.recipe.entropy_at(step))
        repaired, repairs = repair(groups)
        sequences = sequences_of_step(repaired, self.preset)
        number_tokens(sequences)
        lr = self.recipe.lr_at(step)
        of_critic = {} if self.critic is None else self.critic.learn(sequences, lr)
        is_frozen = self.critic is not None and step < self.recipe.algorithm.critic.warmup_steps
        balance_step = 0.0 if is_frozen else self.recipe.balance_step
        self.step.cfg = self.step.cfg.model_copy(update={"balance_step": balance_step})
        parts = [self._batches(part) for part in divided(repaired, sequences, self.recipe.algorithm.steps_per_batch)]
        if len(parts) > 1 and self.preset.needs_old:
            parts = [
                [with_logprobs(self.step, batch, "old", self.objective.scorer) for batch in batches]
                for batches in parts
            ]
        metrics: dict[str, float] = {}
        for batches in parts:
            metrics = self.step.run(batches, 0.0 if is_frozen else lr)  # at rate 0 it gives figures alone
        if is_frozen or self.recipe.resets_after(step):
            self.step.optimizers.reset()
        return Trained(metrics | of_critic, repairs, self._scored.take(sequences))

    def _batches(self, sequences: Sequence[TrainingSequence]) -> list[Batch]:
        packed = batches_of(sequences, pack(sequences, self.recipe.pass_tokens), 0)
        batches = [batch.to(self.device) for batch in packed]
        if self.reference is not None:
            batches = [with_logprobs(self.step, batch, "reference", model=self.reference) for batch in batches]
        return batches

    def weights(self) -> dict[str, Tensor]:
        """The weights as the engine gets them."""
        return self.model.state_dict()

    def learnt(self) -> Mapping[str, Tensor]:
        """The weights as the optimizer updates them."""
        return self.step.state()["model"]

    def state(self) -> dict[str, Any]:
        reference = None if self.reference is None else self.reference.state_dict()
        critic = None if self.critic is None else self.critic.step.state()
        return {**self.step.state(), "reference": reference, "critic": critic}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.begin()
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        if self.critic is not None:
            self.critic.step.load_state(state["critic"])
        self.step.load_state(state)


def _supervised(examples: Sequence[tuple[list[int], list[bool]]]) -> Batch:
    ids = torch.from_numpy(np.concatenate([np.array(ids, np.int64) for ids, _ in examples]))
    marks = torch.from_numpy(np.concatenate([np.array(marks, np.float32) for _, marks in examples]))
    return Batch(ids, marks, [len(ids) for ids, _ in examples])
