"""Objectives on pairs of answers: the reward model's (Bradley-Terry) and direct preference optimization (DPO).

    loss = -log sigmoid(s_chosen - s_rejected), the mean over pairs
    reward   s = the value head at the last token                                  (Ouyang et al. 2022, equation 1)
    dpo      s = beta (log pi(answer) - log pi_ref(answer)), sums over its tokens  (Rafailov et al. 2023, equation 7)

The documents 2i and 2i + 1 of a batch are the chosen and the rejected answer of a pair. Log-probabilities under the
reference, the model that the stage began with, are computed once, before the stage (reference.py).
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.common.errors import TrainingError
from glm5.config.train import StageConfig
from glm5.kernels.token_logprobs import token_logprobs
from glm5.model.glm5 import Glm5
from glm5.train.batch import Batch
from glm5.train.calibration import accuracy, calibration_error, fitted_temperature, is_at_limit, mean_loss
from glm5.train.objective import Losses, Pass
from glm5.train.reward_model import last_rewards
from glm5.train.step import Phase

logger = logging.getLogger(__name__)

REFERENCE = "reference"
"""The column of batches that has a document's log-probability under the reference at its last token."""
BETA = 0.1


class PairObjective(ABC):
    """An `Objective` on pairs, by a score of each document."""

    factors: Mapping[str, float] = {"loss": 1.0, "accuracy": 0.0, "margin": 0.0, "chosen": 0.0, "rejected": 0.0}

    @abstractmethod
    def scores(self, model: Glm5, hidden_TD: Tensor, batch: Batch) -> Tensor:
        """Of each document of the batch, [B] in float32 or wider."""

    def totals(self, batches: Sequence[Batch]) -> dict[str, float]:
        return {"pairs": sum(len(batch.lengths) for batch in batches) / 2}

    def check(self, totals: Mapping[str, float], num_batches: int) -> None:
        if not totals["pairs"]:
            raise TrainingError(f"nothing to learn from in {num_batches} batches: there is no pair")

    def losses(self, of: Pass) -> Losses:
        score_B, num_pairs = self.scores(of.model, of.hidden_TD, of.batch), of.totals["pairs"]
        chosen_P, rejected_P = score_B[::2], score_B[1::2]
        difference_P = chosen_P - rejected_P
        yield "loss", preference_loss(difference_P) / num_pairs
        seen_P = difference_P.detach()
        yield "accuracy", ((seen_P > 0) + 0.5 * (seen_P == 0)).sum() / num_pairs
        yield "margin", seen_P.sum() / num_pairs
        yield "chosen", chosen_P.detach().sum() / num_pairs
        yield "rejected", rejected_P.detach().sum() / num_pairs


class BradleyTerry(PairObjective):
    def scores(self, model: Glm5, hidden_TD: Tensor, batch: Batch) -> Tensor:
        return last_rewards(model, hidden_TD, batch.lengths)


class DirectPreference(PairObjective):
    """`chunk`: tokens whose logits exist at a time."""

    def __init__(self, beta: float, chunk: int) -> None:
        self.beta, self.chunk = beta, chunk

    def scores(self, model: Glm5, hidden_TD: Tensor, batch: Batch) -> Tensor:
        last_B = torch.tensor(batch.lengths).cumsum(0) - 1
        reference_B = batch.columns[REFERENCE][last_B].to(hidden_TD.device)
        answer_B = answer_logprobs(model, hidden_TD, batch, self.chunk)
        return self.beta * (answer_B - reference_B.to(answer_B.dtype))


def objective_of(stage: StageConfig, chunk: int) -> PairObjective | None:
    """What a stage minimises on pairs; None of a stage that learns from tokens."""
    if stage.kind == "reward":
        return BradleyTerry()
    if stage.kind == "dpo":
        return DirectPreference(BETA if stage.beta is None else stage.beta, chunk)
    return None


def preference_loss(difference_P: Tensor) -> Tensor:
    """The sum of -log sigmoid(difference), exact for differences of any size."""
    return F.softplus(-difference_P).sum()


def reference_loss(differences: Sequence[float]) -> float:
    """The definition of `preference_loss`, number by number in float64; overflows below -700."""
    return math.fsum(-math.log(1 / (1 + math.exp(-one))) for one in differences)


def answer_logprobs(model: Glm5, hidden_TD: Tensor, batch: Batch, chunk: int) -> Tensor:
    """The sum of the log-probabilities of each document's tokens with a weight, [B] in float32 or wider."""
    position_G, target_G, weight_G = batch.targets(1)
    logprob_G = token_logprobs(hidden_TD[position_G], model.lm_head.weight, target_G, chunk=chunk) * weight_G
    row_T = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths))
    row_G = row_T.to(position_G.device)[position_G]
    return logprob_G.new_zeros(len(batch.lengths)).index_add(0, row_G, logprob_G)


@torch.no_grad()
def held_out_pairs(model: Glm5, batches: Sequence[Batch], phase: Phase, objective: PairObjective) -> dict[str, float]:
    """Metrics of held-out pairs. Of rewards also the temperature that is fitted on them, and the calibration error with
    and without it."""
    parts: list[Tensor] = []
    for batch in batches:
        score_B = objective.scores(model, model(batch.ids_T, phase.view(batch)), batch)
        parts.append((score_B[::2] - score_B[1::2]).double().cpu())
    difference_P = torch.cat(parts).numpy()
    found = {
        "held-out loss": mean_loss(difference_P),
        "held-out accuracy": accuracy(difference_P),
        "held-out margin": float(difference_P.mean()),
        "held-out pairs": float(len(difference_P)),
    }
    if isinstance(objective, BradleyTerry):
        temperature = fitted_temperature(difference_P)
        if is_at_limit(temperature):
            logger.warning(
                "no temperature fits the %d held-out pairs, which are all ranked right or all wrong, so rewards are "
                "not calibrated; hold out more pairs (held_out of the data, checkpoints.held_out)",
                len(difference_P),
            )
        found |= {
            "calibration error": calibration_error(difference_P),
            "calibrated error": calibration_error(difference_P, temperature),
            "calibrated loss": mean_loss(difference_P, temperature),
            "temperature": temperature,
        }
    return found
