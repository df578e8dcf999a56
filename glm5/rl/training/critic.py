"""The critic of SAO (arXiv 2607.07508): a second model that says what reward to expect, and advantages by its values.

    before a policy step    values of all sampled tokens -> GAE, with lambda by the length -> the column "advantage"
                            then `updates` steps on (V - return)^2 / 2, the mean over all sampled tokens
    return of a token       with lambda 1 and gamma 1, the rollout's reward; where its last reply was cut, and the
                            value behind it

It begins as the policy, with a value head of zeros. Only projections of MLPs and experts, and the head, learn: with
attention, its gradients grow until it fails (SAO). A rollout with several sequences (a compacted context) has them as
segments, which share its end.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.config.rl import CriticSection, RLRecipe
from glm5.config.step import LossConfig
from glm5.model.glm5 import Glm5
from glm5.rl.algorithms.gae import adaptive_lambda, cross_segment_factors, skip_observation_gae
from glm5.rl.algorithms.table import Preset, preset_of
from glm5.rl.training.objective import Coefficients, RLObjective
from glm5.rl.training.packing import batch_of, pack
from glm5.rl.training.policy import SPARSE, choose_parameters
from glm5.rl.training.sequences import Column, TrainingSequence
from glm5.train.master_weights import MasterWeights
from glm5.train.optim.build import Optimizers
from glm5.train.step import Step

LEARNING = ("gate_proj", "up_proj", "down_proj", "value_head")
"""Ends of the names of parameters that learn."""


def critic_of(recipe: RLRecipe, preset: Preset) -> CriticSection | None:
    """The settings of the algorithm's critic, None where it has none. Raises ConfigError for settings without one."""
    given = recipe.algorithm.critic
    if given is not None and not preset.needs_critic:
        raise ConfigError(f"algorithm.critic: {recipe.algorithm.name} has no critic; leave it out, or choose sao")
    return (given or CriticSection()) if preset.needs_critic else None


class Critic:
    """`model`: the policy to begin with; it is the critic's own from now on."""

    def __init__(self, cfg: CriticSection, recipe: RLRecipe, model: Glm5) -> None:
        self.cfg, self.model, self._pass_tokens = cfg, model, recipe.pass_tokens
        model.add_value_head()
        choose_parameters(model)
        for name, weight in model.named_parameters():
            weight.requires_grad_(weight.requires_grad and name.removesuffix(".weight").endswith(LEARNING))
        compute = getattr(torch, recipe.model.compute or recipe.model.dtype)
        self.masters = None if compute == model.dtype else MasterWeights(model, compute)
        named = dict(model.named_parameters()) if self.masters is None else self.masters.trained()
        losses = LossConfig(mtp_depth=0, balance_step=0.0, balance_weight=0.0)
        objective = RLObjective(preset_of(recipe.algorithm.name), Coefficients(value=1.0))
        optimizers = Optimizers(named, model.cfg, recipe.optimizer)
        self.step = Step(model, optimizers, losses, SPARSE, self.masters, objective)

    def learn(self, sequences: Sequence[TrainingSequence], lr: float) -> dict[str, float]:
        """Put advantages by the present values into the sequences of a step, then train the critic on their returns;
        `lr`: the policy's. Returns its figures: the loss and the gradient's norm are those of its first update."""
        values, returns = self._values(sequences), list[Column]()
        for _, indices in groupby(range(len(sequences)), lambda i: id(sequences[i].rollout)):
            of_rollout = list(indices)
            returns += judge([sequences[i] for i in of_rollout], [values[i] for i in of_rollout])
        learnt = [
            TrainingSequence(one.ids, {"value": one.columns["policy"], "return": end_T}, one.rollout, one.leaf)
            for one, end_T in zip(sequences, returns, strict=True)
        ]
        batches = [
            batch_of([learnt[i] for i in indices]).to(self.model.device)
            for indices in pack(learnt, self._pass_tokens)[0]
        ]
        updates = [self.step.run(batches, lr * self.cfg.lr) for _ in range(self.cfg.updates)]
        return {
            "critic/loss": updates[0]["value"],
            "critic/grad_norm": updates[0]["trunk norm"],
            "critic/explained_variance": _explained(sequences, values, returns),
        }

    @torch.no_grad()
    def _values(self, sequences: Sequence[TrainingSequence]) -> list[Tensor]:
        """For each sequence the value [T] of the state behind each of its tokens, float64 in host memory."""
        found: dict[int, Tensor] = {}
        assert self.model.value_head is not None
        for indices in pack(sequences, self._pass_tokens)[0]:
            batch = batch_of([sequences[i] for i in indices]).to(self.model.device)
            value_T = self.model.value_head(self.model(batch.ids_T, SPARSE.view(batch)))[:, 0]
            found |= zip(indices, value_T.double().cpu().split(batch.lengths), strict=True)
        return [found[i] for i in range(len(sequences))]

    def state(self) -> dict[str, Any]:
        learnt = self.model.state_dict() if self.masters is None else self.masters.state_dict(self.model)
        return {"model": learnt, "optimizer": self.step.optimizers.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.masters is None:
            self.model.load_state_dict(state["model"])
        else:
            self.masters.load_state_dict(self.model, state["model"])
        self.step.optimizers.load_state_dict(state["optimizer"])


def judge(sequences: Sequence[TrainingSequence], values: Sequence[Tensor]) -> list[Column]:
    """Set the advantages of the sequences of one rollout, in the order of sampling, and return each one's returns [T].
    `values` [T]: of the state behind each token."""
    rollout = sequences[0].rollout
    assert rollout is not None
    sampled = [torch.from_numpy(one.columns["policy"] > 0) for one in sequences]
    counts = [int(is_sampled_T.sum()) for is_sampled_T in sampled]
    ends = [int(is_sampled_T.nonzero()[-1]) for is_sampled_T in sampled]
    behind = values[-1][ends[-1]].item() if rollout.is_truncated else 0.0
    returns, factors = list[Column](), cross_segment_factors(counts).tolist()
    for number, (one, is_sampled_T) in enumerate(zip(sequences, sampled, strict=True)):
        reward_T = torch.zeros(len(one), dtype=torch.float64)
        reward_T[ends[number]] = rollout.reward
        before_T = values[number].roll(1)  # the first token is never sampled
        local_T = skip_observation_gae(reward_T, before_T, is_sampled_T, behind, adaptive_lambda(counts[number]))
        one.columns["advantage"] = (factors[number] * local_T).numpy()
        returns.append(np.where(is_sampled_T.numpy(), rollout.reward + behind, 0.0))
    return returns


def _explained(sequences: Sequence[TrainingSequence], values: Sequence[Tensor], returns: Sequence[Column]) -> float:
    """1 - Var(return - V) / Var(return) over sampled tokens; 0 where all returns are equal."""
    sampled = [one.columns["policy"] > 0 for one in sequences]
    value_N = np.concatenate([value.numpy()[np.flatnonzero(of) - 1] for value, of in zip(values, sampled, strict=True)])
    return_N = np.concatenate([one[of] for one, of in zip(returns, sampled, strict=True)])
    variance = return_N.var()
    return float(1 - (return_N - value_N).var() / variance) if variance else 0.0
