"""What a training step minimises over the tokens of its passes: the step takes its loss from outside.

An objective names its losses, says how much each batch contributes to the denominators, and computes a batch's part of
each mean from hidden states. Sums of denominators run over all batches of a step and over all ranks, so a step does not
depend on how it is cut. The step knows neither the data nor the algorithm behind an objective.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from glm5.common.errors import TrainingError
from glm5.config.step import LossConfig
from glm5.kernels.token_logprobs import token_logprobs
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.train.batch import Batch

Losses = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Pass:
    """A forward pass over `batch` that gave `hidden_TD`. `totals`: sums of the objective's denominators over the step.

    `view_of`: a new view of the batch, for a pass of the MTP layer. `layer_losses(view, name, num_runs)`: losses of the
    indexers and routers that ran with that view, `num_runs` times each. `total`: sums over the ranks that share the
    batch's sequences, None where none do.
    """

    model: Glm5
    batch: Batch
    hidden_TD: Tensor
    totals: Mapping[str, float]
    view_of: Callable[[], PackedView]
    layer_losses: Callable[[PackedView, str, int], Losses]
    total: Callable[[Tensor], Tensor] | None = None


class Objective(Protocol):
    """`factors`: by the name of each loss that it may yield, the factor in the sum that is minimised. A loss without a
    gradient is a figure that is only reported; like a loss it must be a share of a mean over the whole step."""

    @property
    def factors(self) -> Mapping[str, float]: ...

    def totals(self, batches: Sequence[Batch]) -> dict[str, float]:
        """What the batches contribute to each denominator: the same names in the same order for all, also for none."""
        ...

    def check(self, totals: Mapping[str, float], num_batches: int) -> None:
        """Raise TrainingError where there is nothing to learn from. `totals`: of the whole step."""
        ...

    def losses(self, of: Pass) -> Losses:
        """This batch's contributions to the means of the step, without factors."""
        ...


class NextToken:
    """Cross-entropy of the next token and, where the model has an MTP layer, of the tokens after it."""

    def __init__(self, cfg: LossConfig, *, has_mtp: bool) -> None:
        self.cfg = cfg
        self.mtp_depth = cfg.mtp_depth if has_mtp else 0

    @property
    def factors(self) -> dict[str, float]:
        depths = {f"mtp {depth}": 0.0 for depth in range(1, self.mtp_depth + 1)}
        return {"loss": 1.0, "mtp": self.cfg.mtp_weight, **depths}

    def totals(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Sums of the loss weights of targets, by distance."""
        distances = range(1, self.mtp_depth + 2)
        return {str(one): sum(batch.weight_of_targets(one) for batch in batches) for one in distances}

    def check(self, totals: Mapping[str, float], num_batches: int) -> None:
        if not totals["1"]:
            raise TrainingError(
                f"nothing to learn from in {num_batches} batches: no token has a weight and another before it; "
                "look at the loss masks of the data"
            )

    def losses(self, of: Pass) -> Losses:
        yield "loss", self._cross_entropy(of, of.hidden_TD, 1) / of.totals["1"]
        if not self.mtp_depth:
            return
        view = of.view_of()
        depths = [
            self._cross_entropy(of, drafted_TD, depth + 1) / max(of.totals[str(depth + 1)], 1e-20)
            for depth, drafted_TD in enumerate(drafts(of.model, of.batch, of.hidden_TD, view, self.mtp_depth), 1)
        ]
        yield "mtp", torch.stack(depths).mean()
        yield from ((f"mtp {depth}", loss.detach()) for depth, loss in enumerate(depths, 1))
        yield from of.layer_losses(view, "mtp ", self.mtp_depth)  # one layer that ran several times counts once

    def _cross_entropy(self, of: Pass, hidden_TD: Tensor, distance: int) -> Tensor:
        """Weighted sum over targets."""
        position_G, target_G, weight_G = of.batch.targets(distance)
        logprob_G = token_logprobs(hidden_TD[position_G], of.model.lm_head.weight, target_G, chunk=self.cfg.chunk)
        return -(logprob_G * weight_G).sum()


def drafts(model: Glm5, batch: Batch, hidden_TD: Tensor, view: PackedView, depth: int) -> Iterator[Tensor]:
    """Hidden states [T, D] of the MTP layer applied 1 .. `depth` times: the k-th at position p depends on the tokens up
    to p + k. The last k positions of a sequence are meaningless.

    Where iterations share an index selection, that of the first is used, and its indexer is trained by all.
    """
    selection = None
    for distance in range(1, depth + 1):
        hidden_TD, used = model.draft(batch.ids_after(distance), hidden_TD, view, selection)
        selection = used if model.cfg.index_share_for_mtp_iteration else None
        yield hidden_TD
