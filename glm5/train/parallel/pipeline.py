"""Pipeline parallelism: stages of consecutive layers process the passes (microbatches) of a step.

    first stage   the embedding, some layers
    last stage    some layers, the final norm, the head; and the MTP layer, with a copy of the embedding

MTP shares embedding and head with the main model and is on the stage of the head, which therefore has fewer layers
(`row_layout.split_layers`). The gradient of the copy is sent to the first stage, and the updated embedding is sent back
before the next step. Stages exchange only the residual stream: each begins with a layer that selects keys itself.

A rank may have several stages, every `pipeline`-th one (interleaved), which shortens the pipeline bubble.

Schedules are those of torch.distributed.pipelining. Index losses affect only indexers, so their backward pass runs
directly after the forward pass of a stage.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from glm5.common.errors import ConfigError
from glm5.config.step import LossConfig
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.train.balance import Balance
from glm5.train.batch import Batch
from glm5.train.objective import Objective
from glm5.train.optim.build import Optimizers
from glm5.train.parallel.build import ModelShard
from glm5.train.parallel.shards import Root, take_gradients, touch
from glm5.train.parallel.step import DistributedStep
from glm5.train.parallel.training_group import TrainingGroup
from glm5.train.step import Phase, Result

EMBEDDING = "model.embed_tokens.weight"


class Stage:
    """Stage `number` of a model, in `root`. `index_share`: the share of all indexers that this stage has."""

    def __init__(self, root: Root, number: int, layers: range) -> None:
        self.root, self.number, self.layers = root, number, layers
        cfg = root.glm.cfg
        indexers = [layer for layer in range(cfg.num_hidden_layers) if cfg.has_indexer(layer)]
        self.index_share = sum(layer in layers for layer in indexers) / len(indexers)

    @property
    def model(self) -> Glm5:
        return self.root.glm


class PipelineStep(DistributedStep):
    """A step of a rank's stages. `tokens`: the maximal number of tokens of a pass on this rank."""

    def __init__(
        self,
        part: ModelShard,
        team: TrainingGroup,
        optimizers: Optimizers,
        cfg: LossConfig,
        phase: Phase,
        objective: Objective | None = None,
        *,
        tokens: int,
    ) -> None:
        super().__init__(part.roots[-1], team, optimizers, cfg, phase, objective)
        mesh = team.mesh
        self.balance = Balance(nn.ModuleList(root.glm for root in part.roots))
        self._sum_context_counts()
        self.num_stages = mesh.last_stage + 1
        numbers = mesh.stages_of(team.rank)
        self.stages = [Stage(root, i, part.layout.layers[i]) for root, i in zip(part.roots, numbers, strict=True)]
        self.copy = part.copies.get(EMBEDDING)
        self.original = part.local[EMBEDDING] if self.is_first and self.model.cfg.num_nextn_predict_layers else None
        self._tokens, self._dtype = tokens, part.compute
        self._queue = part.queue
        for root in part.roots:
            touch(root)
        self._schedules: dict[int, Any] = {}
        self._batches_and_totals: tuple[Sequence[Batch], Mapping[str, float]] = ((), {})
        self._losses_found: list[dict[str, Tensor]] = []

    @property
    def is_first(self) -> bool:
        return self.stages[0].number == 0

    @property
    def is_last(self) -> bool:
        return self.stages[-1].number == self.num_stages - 1

    def share_embedding(self) -> None:
        """Send the current rows of the embedding from the first stage to the last."""
        if self.original is not None:
            dist.send(self.original.detach(), group=self.team.pipeline, group_dst=self._rank_of(self.num_stages - 1))
        if self.copy is not None:
            dist.recv(self.copy.data, group=self.team.pipeline, group_src=0)

    def relay(
        self, batch: Batch, work: Callable[[Stage, Tensor, PackedView], Any], view_of: Callable[[], PackedView]
    ) -> list[Any]:
        """A forward pass without a schedule, stage by stage. Returns the results of `work`, which is called with the
        output of each of this rank's stages."""
        found: list[Any] = []
        for stage in self.stages:
            x_TD, result = stage.root(self._run_stage, stage, batch, work, view_of())
            if stage.number < self.num_stages - 1:
                after = self._rank_of(stage.number + 1)
                dist.send(x_TD.detach().contiguous(), group=self.team.pipeline, group_dst=after)
            found.append(result)
        return found

    def on_hidden_states(self, batch: Batch, view: PackedView, work: Callable[[Tensor], Result]) -> Result | None:
        def on_last_stage(stage: Stage, x_TD: Tensor, _view: PackedView) -> Result | None:
            return work(stage.model.model.norm(x_TD)) if stage.number == self.num_stages - 1 else None

        return self.relay(batch, on_last_stage, lambda: view)[-1]

    def _run_stage(
        self, stage: Stage, batch: Batch, work: Callable[[Stage, Tensor, PackedView], Any], view: PackedView
    ) -> tuple[Tensor, Any]:
        if stage.number == 0:
            x_TD = stage.model.model.embed_tokens(batch.ids_T)
        else:
            x_TD = self._like().new_empty(len(batch.ids_T), self.model.cfg.hidden_size)
            dist.recv(x_TD, group=self.team.pipeline, group_src=self._rank_of(stage.number - 1))
        x_TD = stage.model.through(x_TD, view, stage.layers)
        return x_TD, work(stage, x_TD, view)

    def _rank_of(self, stage: int) -> int:
        """The rank of a stage in the pipeline's group."""
        return stage % self.team.mesh.pipeline

    def run(self, batches: Sequence[Batch], lr: float) -> dict[str, float]:
        metrics = super().run(batches, lr)
        excess = self.team.largest(torch.tensor(metrics.pop("excess load", -1.0), dtype=torch.float64)).item()
        return metrics if excess < 0 else metrics | {"excess load": excess}

    def _gradients(self, batches: Sequence[Batch], totals: Mapping[str, float]) -> dict[str, Tensor]:
        self.share_embedding()
        return super()._gradients(batches, totals)

    def _local_gradients(self, batches: Sequence[Batch], totals: Mapping[str, float]) -> dict[str, Tensor]:
        self._losses_found = []
        self._batches_and_totals = (batches, totals)
        if any(weight.requires_grad for name, weight in self.optimizers.named.items() if ".indexer." not in name):
            numbers = torch.arange(len(batches), device=self.team.device).unsqueeze(1)
            schedule = self._schedule(len(batches))
            for stage in self.stages:
                stage.root.on_stage = partial(self._forward_stage, stage)
            inputs = (numbers,) if self.is_first else ()
            schedule.step(*inputs, target=numbers if self.is_last else None, number=numbers)
            self._send_gradient()
        else:
            for batch in batches:
                self._warmup_pass(batch)
        sums: dict[str, Tensor] = {}
        for losses in self._losses_found:
            for name, loss in losses.items():
                sums[name] = sums[name] + loss if name in sums else loss
        return sums

    def _schedule(self, num_passes: int) -> Any:
        """The schedule for a number of passes."""
        if num_passes not in self._schedules:
            self._check_num_passes(num_passes)
            stages: list[Any] = [self._pipeline_stage(stage) for stage in self.stages]
            how = {"n_microbatches": num_passes, "loss_fn": lambda out, _target: out.sum(), "scale_grads": False}
            if self._queue is not None:
                self._schedules[num_passes] = ScheduleInterleavedZeroBubble(stages, **how)
            elif len(stages) > 1:
                self._schedules[num_passes] = ScheduleInterleaved1F1B(stages, **how)
            else:
                self._schedules[num_passes] = Schedule1F1B(stages[0], **how)
        return self._schedules[num_passes]

    def _check_num_passes(self, num_passes: int) -> None:
        """Raises ConfigError for a number of passes that the schedule does not support."""
        ranks = self.team.mesh.pipeline
        if num_passes < ranks:
            raise ConfigError(
                f"parallel.pipeline: {ranks} stages need at least as many passes a step and rank, got "
                f"{num_passes}; lower pass_sequences, or raise sequences"
            )
        if (len(self.stages) > 1 or self._queue is not None) and num_passes % (num_passes // ranks):
            raise ConfigError(
                f"parallel.stages: got {num_passes} passes a step and rank; with several stages a rank or zero-bubble "
                f"take a multiple of pipeline ({ranks}), or fewer than {2 * ranks}; change pass_sequences or sequences"
            )

    def _pipeline_stage(self, stage: Stage) -> PipelineStage:
        """The stage for a torch schedule, with the shapes of its inputs and outputs."""
        x_TD = self._like().new_empty(self._tokens, self.model.cfg.hidden_size, device="meta").requires_grad_()
        number = torch.empty(1, 1, dtype=torch.int64, device="meta")
        wide = torch.promote_types(self._dtype, torch.float32)  # as losses are
        loss = torch.empty(1, dtype=wide, device="meta", requires_grad=True)
        return PipelineStage(
            stage.root,
            stage.number,
            self.num_stages,
            self.team.device,
            input_args=(number if stage.number == 0 else x_TD,),
            output_args=(loss if stage.number == self.num_stages - 1 else x_TD,),
            group=self.team.pipeline,
            dw_builder=None if self._queue is None else self._queue.runner,
        )

    def _forward_stage(self, stage: Stage, given: Tensor, number: Tensor) -> Tensor:
        """The residual stream for the next stage, padded to the size of all passes; for the last stage, the loss."""
        batches, totals = self._batches_and_totals
        batch = batches[int(number)]
        view = self._view(batch)
        with self.balance.record(view.row_T, with_loss=self.cfg.balance_weight > 0, num_rows=view.num_rows):
            x_TD = stage.model.model.embed_tokens(batch.ids_T) if stage.number == 0 else given[: len(batch.ids_T)]
            x_TD = stage.model.through(x_TD, view, stage.layers)
            losses = self._losses_of(stage, batch, x_TD, view, totals)
        self._backward_index_losses(losses)
        loss, shown = self._weighted(losses)
        self._losses_found.append(shown)
        if stage.number == self.num_stages - 1:
            assert loss is not None
            return torch.stack([loss])
        if loss is not None:
            x_TD = _WithLoss.apply(x_TD, loss)
        return torch.cat([x_TD, x_TD.new_zeros(self._tokens - len(x_TD), x_TD.shape[1])])

    def _losses_of(
        self, stage: Stage, batch: Batch, x_TD: Tensor, view: PackedView, totals: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Losses of a stage by name. `x_TD`: the output of its layers."""
        losses = dict(self._layer_losses(batch, totals, view))
        if "index" in losses:
            losses["index"] = losses["index"] * stage.index_share
        if stage.number == self.num_stages - 1:
            losses |= dict(self._token_losses(batch, stage.model.model.norm(x_TD), totals))
        return losses

    def _backward_index_losses(self, losses: dict[str, Tensor]) -> None:
        """Run the backward pass of the indexers' losses, and detach them."""
        for name in ("index", "mtp index"):
            if name in losses and losses[name].requires_grad:
                (losses[name] * self.cfg.index_weight).backward()
                losses[name] = losses[name].detach()

    def _warmup_pass(self, batch: Batch) -> None:
        """A pass in warm-up, where no gradients are sent between stages."""
        totals = self._batches_and_totals[1]

        def work(stage: Stage, x_TD: Tensor, view: PackedView) -> tuple[Tensor | None, dict[str, Tensor]]:
            return self._weighted(self._losses_of(stage, batch, x_TD, view, totals))

        view = self._view(batch)
        with self.balance.record(view.row_T, with_loss=self.cfg.balance_weight > 0, num_rows=view.num_rows):
            for loss, losses in self.relay(batch, work, lambda: self._view(batch)):
                assert loss is not None
                loss.backward()
                self._losses_found.append(losses)

    def _take_gradients(self) -> None:
        for stage in self.stages:
            take_gradients(stage.model, self.optimizers.named)

    def _send_gradient(self) -> None:
        """Add the gradient of the embedding's copy to the embedding's."""
        if self.copy is not None:
            take_gradients(self.model, {**self.optimizers.named, EMBEDDING: self.copy})
            grad = torch.zeros_like(self.copy) if self.copy.grad is None else self.copy.grad
            dist.send(grad, group=self.team.pipeline, group_dst=0)
            self.copy.grad = None
        if self.original is not None:
            take_gradients(self.stages[0].model, self.optimizers.named)
            grad = torch.empty_like(self.original)
            dist.recv(grad, group=self.team.pipeline, group_src=self._rank_of(self.num_stages - 1))
            self.original.grad = grad if self.original.grad is None else self.original.grad + grad

    def _like(self) -> Tensor:
        """An empty tensor of the dtype and device of passes."""
        return torch.empty(0, dtype=self._dtype, device=self.team.device)


class _WithLoss(torch.autograd.Function):
    """x, whose backward pass also runs that of `loss`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        dtype, device = ctx.like
        return grad, torch.ones((), dtype=dtype, device=device)
