"""The policy in training: supervised warm-up, then a step for each batch of rollouts."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.checkpoint.save import save
from glm5.checkpoint.versions import WeightFiles
from glm5.config.rl import RLRecipe
from glm5.model.glm5 import Glm5
from glm5.rl.algorithms.table import preset_of
from glm5.rl.build import PolicyBuilder, threads_of
from glm5.rl.records.digest import digests
from glm5.rl.rewards.anchors import Anchors
from glm5.rl.rollout import Group
from glm5.rl.shown import shown_examples
from glm5.rl.state import RunState
from glm5.rl.training.critic import Critic
from glm5.rl.training.exact import ExactPass
from glm5.rl.training.objective import Coefficients, RLObjective
from glm5.rl.training.packing import batches_of, pack
from glm5.rl.training.policy import choose_parameters, policy_step, with_logprobs
from glm5.rl.training.repair import Repairs, repair
from glm5.rl.training.scores import Column, ScoreKeeper, Scores, number_tokens
from glm5.rl.training.sequences import TrainingSequence, divided, sequences_of_step, with_anchors
from glm5.train.batch import Batch
from glm5.train.loop import deterministic, torch_threads
from glm5.train.master_weights import MasterWeights
from glm5.train.metrics import memory
from glm5.train.state import writing_to
from glm5.train.step import Step

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


Sequences = Sequence[TrainingSequence]
Learnt = tuple[dict[str, float], dict[str, Column]]
"""Losses by name, and columns of scores."""


class GroupTrainer(ABC):
    """Makes sequences of groups, which `learn` trains on."""

    def __init__(self, recipe: RLRecipe, anchors: Anchors | None) -> None:
        self.recipe, self.anchors = recipe, anchors
        self.preset = preset_of(recipe.algorithm.name, recipe.algorithm.parameters)

    def train(self, groups: Sequence[Group], step: int) -> Trained:
        """Train on the groups of a step. Raises TrainingError where none can be trained on."""
        repaired, repairs = repair(groups)
        sequences = sequences_of_step(repaired, self.preset)
        parts = divided(repaired, sequences, self.recipe.algorithm.steps_per_batch)
        if self.anchors is not None:
            with_anchors(sequences, parts, self.anchors.of_step(step))
        number_tokens(sequences)
        metrics, columns = self.learn(sequences, parts, step)
        return Trained(metrics, repairs, Scores(sequences, columns))

    @abstractmethod
    def learn(self, sequences: Sequences, parts: Sequence[Sequences], step: int) -> Learnt:
        """An optimizer step for each of the parts of a step's sequences."""


class PolicyTrainer(GroupTrainer):
    """A model, its optimizer and the recipe's algorithm, on one device."""

    rank, num_ranks = 0, 1

    def __init__(self, recipe: RLRecipe, builder: PolicyBuilder, device: torch.device) -> None:
        super().__init__(recipe, builder.anchors)
        self.builder, self.device = builder, device
        self._scored = ScoreKeeper()
        self.objective = RLObjective(self.preset, on_scored=self._scored)
        self.compute: torch.dtype = getattr(torch, recipe.model.compute or recipe.model.dtype)
        self.reference: Glm5 | None = None
        self.critic: Critic | None = None
        self.exact: ExactPass | None = None
        self._build()

    def _build(self) -> None:
        self.model = self.builder.model(self.device)
        choose_parameters(self.model)
        self.masters = None if self.compute == self.model.dtype else MasterWeights(self.model, self.compute)
        optimizer, balance_step = self.recipe.optimizer, self.recipe.balance_step
        self.step: Step = policy_step(self.model, self.objective, optimizer, self.masters, balance_step=balance_step)

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

    def learn(self, sequences: Sequences, parts: Sequence[Sequences], step: int) -> Learnt:
        """See `GroupTrainer`."""
        ce = 0.0 if self.anchors is None else self.anchors.cfg.ce
        kl, entropy = self.recipe.algorithm.reference_kl, self.recipe.entropy_at(step)
        self.objective.coefficients = Coefficients(kl, entropy, ce=ce)
        lr = self.recipe.lr_at(step)
        rollouts = [one for one in sequences if one.rollout is not None]
        of_critic = {} if self.critic is None else self.critic.learn(rollouts, lr)
        is_frozen = self.critic is not None and step < self.recipe.algorithm.critic.warmup_steps
        balance_step = 0.0 if is_frozen else self.recipe.balance_step
        self.step.cfg = self.step.cfg.model_copy(update={"balance_step": balance_step})
        steps = [self._batches(part) for part in parts]
        if len(steps) > 1 and self.preset.needs_old:
            steps = [
                [with_logprobs(self.step, batch, "old", self.objective.scorer) for batch in batches]
                for batches in steps
            ]
        metrics: dict[str, float] = {}
        for batches in steps:
            metrics = self.step.run(batches, 0.0 if is_frozen else lr)  # at rate 0 it gives figures alone
        if is_frozen or self.recipe.resets_after(step):
            self.step.optimizers.reset()
        metrics |= of_critic | {"perf/peak_gib": memory(self.device)}
        return metrics, self._scored.take(sum(map(len, sequences)))

    def _batches(self, sequences: Sequence[TrainingSequence]) -> list[Batch]:
        packed = batches_of(sequences, pack(sequences, self.recipe.pass_tokens, self.num_ranks), self.rank)
        batches = [batch.to(self.device) for batch in packed]
        if self.reference is not None:
            batches = [with_logprobs(self.step, batch, "reference", model=self.reference) for batch in batches]
        return batches

    def weights(self) -> dict[str, Tensor]:
        """The weights as the engine gets them."""
        return self.model.state_dict()

    @cached_property
    def files(self) -> WeightFiles | None:
        """By which weights go to the engines, if by files."""
        return self.builder.weight_files()

    def learnt(self) -> Mapping[str, Tensor]:
        """The weights as the optimizer updates them."""
        return self.step.state()["model"]

    def state(self) -> dict[str, Any]:
        reference = None if self.reference is None else self.reference.state_dict()
        critic = None if self.critic is None else self.critic.step.state()
        return {**self.step.state(), "reference": reference, "critic": critic}

    def save(self, state: RunState, step: int, ladders: Mapping[str, Any], rollouts: Mapping[str, Any] | None) -> None:
        """Write the policy as a checkpoint, and the run's state."""
        folder = state.out / "policy"
        with writing_to(folder):
            save(self.model, folder, assets=self.builder.assets)
        state.write(step, ladders, self.state(), rollouts)

    def digests(self) -> dict[str, str]:
        """Of the weights as the optimizer updates them."""
        return digests(self.learnt())

    @property
    def has_ended(self) -> bool:
        """Whether another process is to blame for an error: there is none."""
        return False

    def close(self) -> None:
        """Nothing runs elsewhere."""

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
