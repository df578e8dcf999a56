"""One training step: losses of packed batches, gradients summed over them and clipped, and the optimizer update.

    loss   =  objective  +  index_weight KL  +  balance_weight L / T
    objective by default:  sum_t w_t CE(t) / sum_t w_t  +  mtp_weight mean_k CE_k

All sums run over all batches of the step, so the result does not depend on how the step is cut into batches. CE_k
predicts token p + k + 1 from position p by applying the MTP layer k times with shared weights (DeepSeek-V3 report, 2.2;
GLM-5 report, shared parameters). KL is the indexers' loss (model/index_loss.py), of the MTP layer's indexer too. Other
objectives come from outside (objective.py).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from glm5.common.errors import TrainingError
from glm5.config.step import LossConfig, WindowConfig
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView, Stage
from glm5.train.balance import Balance
from glm5.train.batch import Batch
from glm5.train.device_timer import DeviceTimer
from glm5.train.master_weights import MasterWeights
from glm5.train.objective import Losses, NextToken, Objective, Pass
from glm5.train.optim.build import Optimizers
from glm5.train.sliding_window import WindowView

Result = TypeVar("Result")


@dataclass(frozen=True)
class Phase:
    """The attention of a stage's passes, and whether the indexers are trained. `window`: dense attention with sliding
    windows in some layers."""

    keys: Stage = "dense"
    learn_index: bool = False
    window: WindowConfig | None = None

    def view(self, batch: Batch, *, learning: bool = False) -> PackedView:
        """The `KVView` of a pass over `batch`. `learning`: whether the index loss is needed, if the stage has one."""
        if self.window is not None:
            return WindowView(self.window, batch.lengths, batch.ids_T.device)
        learn_index = self.learn_index and learning
        return PackedView(batch.lengths, batch.ids_T.device, stage=self.keys, learn_index=learn_index)


class Step:
    """Trains `model` with `optimizers`. Also updates the routers' selection biases, unless `balance_step` is 0."""

    def __init__(
        self,
        model: Glm5,
        optimizers: Optimizers,
        cfg: LossConfig,
        phase: Phase,
        masters: MasterWeights | None = None,
        objective: Objective | None = None,
    ):
        """`masters`: the master weights that `optimizers` update, None if they update the model's parameters.
        `objective`: what is minimised over tokens, by default cross-entropy with MTP as `cfg` says."""
        self.model, self.optimizers, self.cfg, self.phase = model, optimizers, cfg, phase
        self.balance, self.masters = Balance(model), masters
        self.optimizer_time = DeviceTimer(model.device)
        """Time of the optimizers' update in the last step, without clipping."""
        self.optimizer_seconds = 0.0
        """`optimizer_time` of the step before the last, which needs no synchronisation."""
        has_mtp = bool(model.cfg.num_nextn_predict_layers)
        self.objective = NextToken(cfg, has_mtp=has_mtp) if objective is None else objective

    def run(self, batches: Sequence[Batch], lr: float) -> dict[str, float]:
        """Train on `batches`; returns mean losses by name, and gradient norms before clipping.

        "loss" is the cross-entropy of the next token. Raises TrainingError, before anything is updated, when a loss or
        a norm is not finite, or when the objective finds nothing to learn from.
        """
        totals = self._totals(batches)
        self.optimizers.zero_grad()
        values = self._gradients(batches, totals)
        values |= {f"{part} norm": norm for part, norm in self.optimizers.clip().items()}
        if excess := self.balance.excess():
            values["excess load"] = torch.stack(list(excess.values())).max()
        # The only synchronisation with a GPU in a step.
        numbers = torch.stack([value.double() for value in values.values()]).tolist()
        self.optimizer_seconds = self.optimizer_time.seconds()
        metrics = dict(zip(values, numbers, strict=True))
        if not_finite := {name: value for name, value in metrics.items() if not math.isfinite(value)}:
            self.optimizers.zero_grad()
            got = ", ".join(f"{name} is {value}" for name, value in not_finite.items())
            raise TrainingError(f"{got}: nothing was updated in this step; {self._advice()}")
        with self.optimizer_time:
            self.optimizers.step(lr)
            if self.masters is not None:
                self.masters.update_model()
        self.optimizers.zero_grad()
        self.balance.update(self.cfg.balance_step)
        return metrics

    def state(self) -> dict[str, Any]:
        """The weights as the optimizers update them, and the optimizers' state: the tensors themselves."""
        weights = self.model.state_dict() if self.masters is None else self.masters.state_dict(self.model)
        return {"model": weights, "optimizer": self.optimizers.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.masters is None:
            self.model.load_state_dict(state["model"])
        else:
            self.masters.load_state_dict(self.model, state["model"])
        self.optimizers.load_state_dict(state["optimizer"])

    def on_hidden_states(self, batch: Batch, view: PackedView, work: Callable[[Tensor], Result]) -> Result | None:
        """What `work` returns for the hidden states [T, D] of a forward pass; None on ranks that do not have them."""
        return work(self.model(batch.ids_T, view))

    def _advice(self) -> str:
        """What to do about values that are not finite."""
        if (name := self._not_finite()) is None:
            return "lower the learning rate, or look at its data"
        return (
            f"{name} holds NaN or infinity itself: where the run began with it, fetch or make its checkpoint again; "
            "else begin anew with a lower learning rate"
        )

    def _not_finite(self) -> str | None:
        """The name of the first parameter with NaN or infinity."""
        return first_not_finite(self.model.named_parameters())

    def _totals(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The objective's denominators and the number of "tokens", summed over the step."""
        tokens = float(sum(len(batch.ids_T) for batch in batches))
        totals = self._sum_over_ranks({"tokens": tokens, **self.objective.totals(batches)})
        self.objective.check(totals, len(batches))
        return totals

    def _sum_over_ranks(self, totals: dict[str, float]) -> dict[str, float]:
        """The totals over all ranks; in this class there is one."""
        return totals

    def _gradients(self, batches: Sequence[Batch], totals: Mapping[str, float]) -> dict[str, Tensor]:
        """Mean losses of the step by name; their gradients are added to the parameters'."""
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for batch in batches:
            for name, loss in self._backward(batch, totals).items():
                parts[name].append(loss)
        return {name: torch.stack(losses).sum() for name, losses in parts.items()}

    def _backward(self, batch: Batch, totals: Mapping[str, float]) -> dict[str, Tensor]:
        view = self._view(batch)
        with_loss = self.cfg.balance_weight > 0
        with self.balance.record(view.row_T, with_loss=with_loss, num_rows=view.num_rows):
            loss, losses = self._pass(batch, view, totals)
            if loss is not None:
                loss.backward()
        return losses

    def _view(self, batch: Batch) -> PackedView:
        return self.phase.view(batch, learning=True)

    def _pass(
        self, batch: Batch, view: PackedView, totals: Mapping[str, float]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """(weighted sum of the losses with gradients, or None; each loss by name)."""
        return self._weighted(dict(self._losses(batch, view, totals)))

    def _weighted(self, losses: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
        factors = self.factors
        if unknown := sorted(losses.keys() - factors):
            raise TrainingError(f"loss {unknown[0]!r} is none of this step's; allowed: {', '.join(factors)}")
        trained = [loss * factors[name] for name, loss in losses.items() if loss.requires_grad]
        return torch.stack(trained).sum() if trained else None, {name: loss.detach() for name, loss in losses.items()}

    @property
    def factors(self) -> dict[str, float]:
        """Of each loss that the step may have, in an order that is the same on all ranks."""
        layers = {"index": self.cfg.index_weight, "balance": self.cfg.balance_weight}
        return {**layers, **self.objective.factors, **{f"mtp {name}": factor for name, factor in layers.items()}}

    def _losses(self, batch: Batch, view: PackedView, totals: Mapping[str, float]) -> Losses:
        """This batch's contributions to the mean losses of the step, not weighted."""
        hidden_TD = self.model(batch.ids_T, view)
        yield from self._layer_losses(batch, totals, view)
        yield from self._token_losses(batch, hidden_TD, totals)

    def _layer_losses(
        self, batch: Batch, totals: Mapping[str, float], view: PackedView, name: str = "", num_runs: int = 1
    ) -> Losses:
        """Losses of the indexers and routers that have run since the last call, `num_runs` times each."""
        if self.phase.learn_index:
            yield f"{name}index", view.index_loss() * (len(batch.ids_T) / totals["tokens"])
        if losses := self.balance.losses():
            yield f"{name}balance", torch.stack(losses).sum() * (1 / (totals["tokens"] * num_runs))

    def _token_losses(self, batch: Batch, hidden_TD: Tensor, totals: Mapping[str, float]) -> Losses:
        """The objective's, with those of the MTP layer's indexer and router."""
        layer_losses = partial(self._layer_losses, batch, totals)
        of = Pass(self.model, batch, hidden_TD, totals, lambda: self._view(batch), layer_losses, self.balance.total)
        yield from self.objective.losses(of)


@torch.no_grad()
def first_not_finite(values: Iterable[tuple[str, Tensor]]) -> str | None:
    for name, weight in values:
        wide = weight.float() if weight.is_floating_point() and weight.element_size() == 1 else weight
        if not wide.isfinite().all():
            return name
    return None
