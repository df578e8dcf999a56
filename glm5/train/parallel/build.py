"""A model of which every process makes only its own part: shapes first, then FSDP2's shards, then this rank's rows."""

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
from glm5.train.parallel.shards import Root, deal_experts, local_parameters, shard
from glm5.train.parallel.stages import keep_stage
from glm5.train.parallel.training_group import TrainingGroup


@dataclass(frozen=True)
class ModelShard:
    """This rank's part of a model: `local` are its rows of the parameters, in the memory of the shards of `roots`, one
    for each stage that it has.

    `copies`: likewise, of parameters that are another stage's. `dtype`: of what is trained; `compute`: of
    passes. `queue`: where gradients of weights wait, if they do. `has_base`: what is not trained is of a checkpoint,
    as that stores it, and neither cast nor written.
    """

    roots: tuple[Root, ...]
    places: RowLayout
    local: dict[str, nn.Parameter]
    copies: dict[str, nn.Parameter]
    dtype: torch.dtype
    compute: torch.dtype
    queue: Queue | None = None
    has_base: bool = False

    @property
    def model(self) -> Glm5:
        """Of its last stage."""
        return self.roots[-1].glm

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Biases of routers: whole, on every rank that has the layer."""
        return {name: one for root in self.roots for name, one in root.glm.named_buffers()}


def outline(cfg: ModelConfig, dtype: torch.dtype) -> Glm5:
    """A model without content."""
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
    """The rank's part of `model`, which has shapes and no content, and knows which parameters learn; with whatever
    content."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    places = RowLayout(team.mesh, model.cfg, shapes, mtp_depth)
    like = torch.empty(0, dtype=compute, device=team.device)
    queue = Queue() if parallel.schedule == "zero-bubble" and team.mesh.pipeline > 1 else None
    roots: list[Root] = []
    for stage in team.mesh.stages_of(team.rank):
        part = deepcopy(model)
        keep_stage(part, places, stage, like)
        if queue is not None:
            defer_linears(part, queue)
        deal_experts(part, team, gathers=parallel.dispatch == "all-gather")
        roots.append(shard(part.train(), team, places, dtype, dtype if has_base else compute))
        roots[-1].to_empty(device=team.device)
    local = {name: mine for root in roots for name, mine in local_parameters(root.glm).items()}
    copies = {name: local.pop(name) for name in list(local) if not places.is_of(name, team.rank)}
    return ModelShard(tuple(roots), places, local, copies, dtype, compute, queue, has_base)


@torch.no_grad()
def fill(
    part: ModelShard, rank: int, rows_of: Callable[[str, list[Span]], Tensor], buffer_of: Callable[[str], Tensor]
) -> None:
    """With rows of weights by name and spans, and buffers by name."""
    for name, mine in part.local.items():
        mine.copy_(rows_of(name, part.places.spans(name, rank)).view_as(mine))
    for name, buffer in part.buffers.items():
        buffer.copy_(buffer_of(name))


def take_rows(whole: Tensor, spans: list[Span]) -> Tensor:
    """The rows of the spans, below each other; of a vector, its values."""
    rows = whole if whole.dim() == 1 else whole.reshape(-1, whole.shape[-1])
    return torch.cat([rows[start:stop] for start, stop in spans]) if spans else rows[:0]


def put_rows(whole: Tensor, spans: list[Span], part: Tensor) -> None:
    """The reverse: write a rank's rows into the whole tensor."""
    rows = whole if whole.dim() == 1 else whole.view(-1, whole.shape[-1])
    part = part.reshape(-1, *rows.shape[1:])
    at = 0
    for start, stop in spans:
        rows[start:stop] = part[at : at + stop - start]
        at += stop - start
