"""The critic of SAO (arXiv 2607.07508): a second model that says what reward to expect, and advantages by its values.

    before a policy step   values of sampled tokens -> GAE -> the column "advantage"; then `updates` steps on
                           (V - return)^2 / 2, the mean over sampled tokens
    return of a token      with lambda and gamma 1: the rollout's reward, and the value behind it where it was cut off

It begins as the policy, with a value head of zeros where that has none. Only projections of MLPs and experts, and the
head, learn: with attention, its gradients grow until it fails (SAO). The sequences of a rollout whose context was
compacted are segments, which share its end.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from glm5.config.rl import RLRecipe
from glm5.model.glm5 import Glm5
from glm5.rl.algorithms.gae import adaptive_lambda, cross_segment_factors, skip_observation_gae
from glm5.rl.algorithms.table import preset_of
from glm5.rl.training.objective import Coefficients, RLObjective
from glm5.rl.training.packing import batch_of, batches_of, pack
from glm5.rl.training.policy import SPARSE, choose_parameters, policy_step
from glm5.rl.training.sequences import TrainingSequence
from glm5.train.master_weights import MasterWeights


def is_learning(name: str) -> bool:
    """Whether the critic's parameter of this name learns."""
    return name.removesuffix(".weight").endswith(("gate_proj", "up_proj", "down_proj", "value_head"))


class Critic:
    """`model`: like the policy's, the critic's own from now on. `weights`: of the policy to begin with."""

    def __init__(self, recipe: RLRecipe, model: Glm5, weights: Mapping[str, Tensor]) -> None:
        self.cfg, self.model, self._pass_tokens = recipe.algorithm.critic, model, recipe.pass_tokens
        model.load_state_dict(weights)
        model.add_value_head()
        _choose(model)
        compute = getattr(torch, recipe.model.compute or recipe.model.dtype)
        masters = None if compute == model.dtype else MasterWeights(model, compute)
        objective = RLObjective(preset_of(recipe.algorithm.name), Coefficients(value=1.0))
        self.step = policy_step(model, objective, recipe.optimizer, masters, choose=_choose)

    def learn(self, sequences: Sequence[TrainingSequence], lr: float) -> dict[str, float]:
        """Put advantages by the present values into the sequences of a step, then train the critic on their returns;
        `lr`: the policy's. Returns its figures, of before its first update."""
        values, learnt = self._values(sequences), list[TrainingSequence]()
        for _, indices in groupby(range(len(sequences)), lambda i: id(sequences[i].rollout)):
            of_rollout = list(indices)
            learnt += judge([sequences[i] for i in of_rollout], [values[i] for i in of_rollout])
        batches = [batch.to(self.model.device) for batch in batches_of(learnt, pack(learnt, self._pass_tokens), 0)]
        updates = [self.step.run(batches, lr * self.cfg.lr) for _ in range(self.cfg.updates)]
        columns = (np.concatenate([one.columns[name] for one in learnt]) for name in ("value", "return", "expected"))
        weight_T, return_T, expected_T = columns
        error, variance = (one_T[weight_T > 0].var() for one_T in (return_T - expected_T, return_T))
        return {
            "critic/loss": updates[0]["value"],
            "critic/grad_norm": updates[0]["trunk norm"],
            "critic/explained_variance": float(1 - error / variance) if variance else 0.0,
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


def judge(sequences: Sequence[TrainingSequence], values: Sequence[Tensor]) -> list[TrainingSequence]:
    """Set advantages of the sequences of one rollout, given in the order of sampling, and return what the critic learns
    of them. `values` [T]: of the state behind each token."""
    rollout = sequences[0].rollout
    assert rollout is not None
    sampled = [torch.from_numpy(one.columns["policy"] > 0) for one in sequences]
    ends = [int(is_sampled_T.nonzero()[-1]) for is_sampled_T in sampled]
    counts = [int(is_sampled_T.sum()) for is_sampled_T in sampled]
    behind = values[-1][ends[-1]].item() if rollout.is_truncated else 0.0
    found, factors = list[TrainingSequence](), cross_segment_factors(counts).tolist()
    for number, (one, is_sampled_T) in enumerate(zip(sequences, sampled, strict=True)):
        reward_T = torch.zeros(len(one), dtype=torch.float64)
        reward_T[ends[number]] = rollout.reward
        expected_T = values[number].roll(1)  # the first token is never sampled
        local_T = skip_observation_gae(reward_T, expected_T, is_sampled_T, behind, adaptive_lambda(counts[number]))
        one.columns["advantage"] = (factors[number] * local_T).numpy()
        return_T = np.full(len(one), rollout.reward + behind)
        columns = {"value": one.columns["policy"], "return": return_T, "expected": expected_T.numpy()}
        found.append(TrainingSequence(one.ids, columns, rollout, one.leaf))
    return found


def _choose(model: Glm5) -> None:
    """Set `requires_grad`."""
    choose_parameters(model)
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad and is_learning(name))
