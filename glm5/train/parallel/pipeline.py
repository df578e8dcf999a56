"""A model in stages of consecutive layers, through which the passes of a step go one behind the other.

    first stage   the embedding, some layers
    last stage    some layers, the final norm, the head; and the MTP layer, with a copy of the embedding

MTP shares embedding and head with the main model, and stands where the head is: the last stage has fewer layers for it
(`places.split_layers`). The copy's gradient goes to the embedding's holders, their rows come back before the next step.
Between stages goes the residual stream alone: a stage begins with a layer that selects keys itself.

The order of passes, and what waits for what, is torch.distributed.pipelining's. Losses of indexers reach nothing but
indexers, so their gradients are found as soon as a stage has run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

from glm5.common.errors import ConfigError
from glm5.config.step import LossConfig
from glm5.model.packed import PackedView
from glm5.train.batch import Batch
from glm5.train.optim.build import Optimizers
from glm5.train.parallel.build import Part
from glm5.train.parallel.shards import take_gradients, touch
from glm5.train.parallel.step import SharedStep
from glm5.train.parallel.team import Team
from glm5.train.step import Phase

EMBEDDING = "model.embed_tokens.weight"


class PipelineStep(SharedStep):
    """A step of one stage. `tokens`: that a pass has on this rank at most."""

    def __init__(
        self,
        part: Part,
        team: Team,
        optimizers: Optimizers,
        cfg: LossConfig,
        phase: Phase,
        *,
        tokens: int,
    ) -> None:
        super().__init__(part.root, team, optimizers, cfg, phase)
        self.stage, self.num_stages = team.mesh.stage(team.rank), team.mesh.pipeline
        self.layers = part.places.layers[self.stage]
        self.copy = part.copies.get(EMBEDDING)
        has_copy = self.num_stages > 1 and self.model.cfg.num_nextn_predict_layers
        self.original = part.local[EMBEDDING] if self.stage == 0 and has_copy else None
        self._tokens, self._dtype = tokens, part.compute
        indexers = [layer for layer in range(self.model.cfg.num_hidden_layers) if self.model.cfg.has_indexer(layer)]
        self._index_share = sum(layer in self.layers for layer in indexers) / len(indexers)
        self._queue = part.queue
        touch(part.root)
        self._ready: dict[int, Any] = {}
        self._passing: tuple[Sequence[Batch], Mapping[int, float]] = ((), {})
        self._found: list[dict[str, Tensor]] = []

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def share_embedding(self) -> None:
        """Give the last stage the rows that the first one has now."""
        if self.original is not None:
            dist.send(self.original.detach(), group=self.team.pipeline, group_dst=self.num_stages - 1)
        if self.copy is not None:
            dist.recv(self.copy.data, group=self.team.pipeline, group_src=0)

    def relay(self, batch: Batch, work: Callable[[Tensor, PackedView], Any], view: PackedView) -> Any:
        """A pass without a schedule: input of this stage to `work`, its output to the next stage. What the last stage's
        `work` makes of the residual stream behind its layers; None on the others."""

        def pass_on() -> tuple[Tensor, Any]:
            if self.stage == 0:
                x_TD = self.model.model.embed_tokens(batch.ids_T)
            else:
                x_TD = self._like().new_empty(len(batch.ids_T), self.model.cfg.hidden_size)
                dist.recv(x_TD, group=self.team.pipeline, group_src=self.stage - 1)
            x_TD = self.model.through(x_TD, view, self.layers)
            return x_TD, work(x_TD, view)

        x_TD, result = self.root(pass_on)
        if not self.is_last:
            dist.send(x_TD.detach().contiguous(), group=self.team.pipeline, group_dst=self.stage + 1)
        return result

    def run(self, batches: Sequence[Batch], lr: float) -> dict[str, float]:
        figures = super().run(batches, lr)
        excess = self.team.largest(torch.tensor(figures.pop("excess load", -1.0), dtype=torch.float64)).item()
        return figures if excess < 0 else figures | {"excess load": excess}

    def _gradients(self, batches: Sequence[Batch], totals: Mapping[int, float]) -> dict[str, Tensor]:
        self.share_embedding()
        return super()._gradients(batches, totals)

    def _passes(self, batches: Sequence[Batch], totals: Mapping[int, float]) -> dict[str, Tensor]:
        self._found = []
        self._passing = (batches, totals)
        if any(weight.requires_grad for name, weight in self.model.named_parameters() if ".indexer." not in name):
            numbers_N1 = torch.arange(len(batches), device=self.team.device).unsqueeze(1)
            schedule = self._prepared(len(batches))
            self.root.on_stage = self._on_stage
            inputs = (numbers_N1,) if self.stage == 0 else ()
            schedule.step(*inputs, target=numbers_N1 if self.is_last else None, number=numbers_N1)
            self._send_gradient()
        else:
            for batch in batches:
                self._learn_index(batch)
        sums: dict[str, Tensor] = {}
        for losses in self._found:
            for name, loss in losses.items():
                sums[name] = sums[name] + loss if name in sums else loss
        return sums

    def _prepared(self, num_passes: int) -> Any:
        """A schedule of so many passes."""
        if num_passes not in self._ready:
            if num_passes < self.num_stages:
                raise ConfigError(
                    f"parallel.pipeline: {self.num_stages} stages need at least as many passes a step and rank, got "
                    f"{num_passes}; lower pass_sequences, or raise sequences"
                )
            x_TD = self._like().new_empty(self._tokens, self.model.cfg.hidden_size, device="meta").requires_grad_()
            number = torch.empty(1, 1, dtype=torch.int64, device="meta")
            stage = PipelineStage(
                self.root,
                self.stage,
                self.num_stages,
                self.team.device,
                input_args=(number if self.stage == 0 else x_TD,),
                output_args=(self._like().new_empty(1, device="meta").requires_grad_() if self.is_last else x_TD,),
                group=self.team.pipeline,
                dw_builder=None if self._queue is None else self._queue.runner,
            )
            how = {"n_microbatches": num_passes, "loss_fn": lambda out_1, _target: out_1.sum(), "scale_grads": False}
            if self._queue is None:
                self._ready[num_passes] = Schedule1F1B(stage, **how)
            else:
                self._ready[num_passes] = ScheduleInterleavedZeroBubble([stage], **how)
        return self._ready[num_passes]

    def _on_stage(self, given: Tensor, number: Tensor) -> Tensor:
        """The residual stream for the next stage, padded to the size that all passes have; of the last, its loss."""
        batches, totals = self._passing
        batch = batches[int(number)]
        view = self._view(batch)
        with self.balance.watch(view.row_T, with_loss=self.cfg.balance_weight > 0, num_rows=view.num_rows):
            x_TD = self.model.model.embed_tokens(batch.ids_T) if self.stage == 0 else given[: len(batch.ids_T)]
            x_TD = self.model.through(x_TD, view, self.layers)
            losses = dict(self._layer_losses(batch, view, totals))
            if "index" in losses:
                losses["index"] = losses["index"] * self._index_share
            if self.is_last:
                losses |= dict(self._token_losses(batch, self.model.model.norm(x_TD), totals))
        self._learn_apart(losses)
        loss, shown = self._weighted(losses)
        self._found.append(shown)
        if self.is_last:
            assert loss is not None
            return torch.stack([loss])
        if loss is not None:
            x_TD = _Beside.apply(x_TD, loss)
        return torch.cat([x_TD, x_TD.new_zeros(self._tokens - len(x_TD), x_TD.shape[1])])

    def _learn_apart(self, losses: dict[str, Tensor]) -> None:
        """Gradients of the indexers' losses, which then need no more."""
        for name in ("index", "mtp index"):
            if name in losses and losses[name].requires_grad:
                (losses[name] * self._weight(name)).backward()
                losses[name] = losses[name].detach()

    def _learn_index(self, batch: Batch) -> None:
        """Warm-up: nothing goes back from stage to stage."""
        totals = self._passing[1]

        def work(x_TD: Tensor, view: PackedView) -> tuple[Tensor | None, dict[str, Tensor]]:
            losses = dict(self._layer_losses(batch, view, totals))
            losses["index"] = losses["index"] * self._index_share
            if self.is_last:
                losses |= dict(self._token_losses(batch, self.model.model.norm(x_TD), totals))
            return self._weighted(losses)

        view = self._view(batch)
        with self.balance.watch(view.row_T, with_loss=self.cfg.balance_weight > 0, num_rows=view.num_rows):
            loss, losses = self.relay(batch, work, view)
            assert loss is not None
            loss.backward()
        self._found.append(losses)

    def _send_gradient(self) -> None:
        """Add the gradient of the embedding's copy to the embedding's."""
        if self.copy is not None:
            take_gradients(self.model, {**self.optimizers.named, EMBEDDING: self.copy})
            grad = torch.zeros_like(self.copy) if self.copy.grad is None else self.copy.grad
            dist.send(grad, group=self.team.pipeline, group_dst=0)
            self.copy.grad = None
        if self.original is not None:
            take_gradients(self.model, self.optimizers.named)
            grad = torch.empty_like(self.original)
            dist.recv(grad, group=self.team.pipeline, group_src=self.num_stages - 1)
            self.original.grad = grad if self.original.grad is None else self.original.grad + grad

    def _like(self) -> Tensor:
        """An empty tensor of the dtype and device of passes."""
        return torch.empty(0, dtype=self._dtype, device=self.team.device)


class _Beside(torch.autograd.Function):
    """x, with a loss that is learnt from when x's gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        dtype, device = ctx.like
        return grad, torch.ones((), dtype=dtype, device=device)
