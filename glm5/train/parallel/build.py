"""Builds this rank's part of a model: on device meta, then sharded with FSDP2, then filled with this rank's rows."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glm5.config.model import ModelConfig
from glm5.config.parallel import ParallelConfig
from glm5.model.glm5 import Glm5
from glm5.train.parallel.deferred import Queue, defer_linears
from glm5.train.parallel.row_layout import RowLayout, Span
from glm5.train.parallel.shards import Root, local_parameters, shard, use_expert_parallel
from glm5.train.parallel.stages import keep_stage
from glm5.train.parallel.training_group import TrainingGroup


@dataclass(frozen=True)
class ModelShard:
    """This rank's part of a model. `roots`: one for each of its pipeline stages. `local`: its rows of the parameters,
    which share memory with the shards of `roots`.

    `copies`: rows of parameters that belong to another stage. `dtype`: of trained parameters; `compute`: of passes.
    `queue`: deferred weight gradients, if any. `has_base`: frozen weights are in a checkpoint's format, and are neither
    cast nor saved.
    """

    roots: tuple[Root, ...]
    layout: RowLayout
    local: dict[str, nn.Parameter]
    copies: dict[str, nn.Parameter]
    dtype: torch.dtype
    compute: torch.dtype
    queue: Queue | None = None
    has_base: bool = False

    @property
    def model(self) -> Glm5:
        """The model of this rank's last stage."""
        return self.roots[-1].glm

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Routers' selection biases, which are replicated on all ranks of the stage."""
        return {name: one for root in self.roots for name, one in root.glm.named_buffers()}


def outline(cfg: ModelConfig, dtype: torch.dtype) -> Glm5:
    """A model on device meta."""
    with torch.device("meta"):
        return Glm5(cfg).to(dtype)


def build(
    model: Glm5,
    team: TrainingGroup,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    compute: torch.dtype,
    mtp_depth: int,
    has_base: bool = False,
) -> ModelShard:
    """This rank's part of `model`, with uninitialised parameters. `model` is on device meta."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    layout = RowLayout(team.mesh, model.cfg, shapes, mtp_depth)
    like = torch.empty(0, dtype=compute, device=team.device)
    queue = Queue() if parallel.schedule == "zero-bubble" and team.mesh.pipeline > 1 else None
    roots: list[Root] = []
    for stage in team.mesh.stages_of(team.rank):
        part = deepcopy(model)
        keep_stage(part, layout, stage, like)
        if queue is not None:
            defer_linears(part, queue)
        use_expert_parallel(part, team, all_gather_tokens=parallel.dispatch == "all-gather")
        roots.append(shard(part.train(), team, layout, dtype, dtype if has_base else compute))
        roots[-1].to_empty(device=team.device)
    local = {name: rows for root in roots for name, rows in local_parameters(root.glm).items()}
    copies = {name: local.pop(name) for name in list(local) if not layout.has_parameter(name, team.rank)}
    return ModelShard(tuple(roots), layout, local, copies, dtype, compute, queue, has_base)


@torch.no_grad()
def fill(
    part: ModelShard, rank: int, rows_of: Callable[[str, list[Span]], Tensor], buffer_of: Callable[[str], Tensor]
) -> None:
    """Fill a part with `rows_of(name, spans)` of weights and `buffer_of(name)` of buffers."""
    for name, rows in part.local.items():
        rows.copy_(rows_of(name, part.layout.spans(name, rank)).view_as(rows))
    for name, buffer in part.buffers.items():
        buffer.copy_(buffer_of(name))


def take_rows(whole: Tensor, spans: list[Span]) -> Tensor:
    """The rows of the spans, concatenated; for a vector, its elements."""
    rows = whole if whole.dim() == 1 else whole.reshape(-1, whole.shape[-1])
    return torch.cat([rows[start:stop] for start, stop in spans]) if spans else rows[:0]


def put_rows(whole: Tensor, spans: list[Span], part: Tensor) -> None:
    """The inverse of `take_rows`: write `part` into the spans of `whole`."""
    rows = whole if whole.dim() == 1 else whole.view(-1, whole.shape[-1])
    part = part.reshape(-1, *rows.shape[1:])
    at = 0
    for start, stop in spans:
        rows[start:stop] = part[at : at + stop - start]
        at += stop - start
