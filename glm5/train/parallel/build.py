"""A model of which every process makes only its own part: shapes first, then FSDP2's shards, then this rank's rows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glm5.config.model import ModelConfig
from glm5.config.parallel import ParallelConfig
from glm5.model.glm5 import Glm5
from glm5.train.parallel.deferred import Queue, defer_linears
from glm5.train.parallel.places import Places, Span
from glm5.train.parallel.shards import Root, deal_experts, local_parameters, shard
from glm5.train.parallel.stages import keep_stage
from glm5.train.parallel.team import Team


@dataclass(frozen=True)
class Part:
    """This rank's part of a model: `local` are its rows of the parameters, in the memory of `root`'s shards.

    `copies`: likewise, of parameters that are another stage's. `dtype`: of what is trained; `compute`: of
    passes. `queue`: where gradients of weights wait, if they do. `has_base`: what is not trained is of a checkpoint,
    as that stores it, and neither cast nor written.
    """

    root: Root
    places: Places
    local: dict[str, nn.Parameter]
    copies: dict[str, nn.Parameter]
    dtype: torch.dtype
    compute: torch.dtype
    queue: Queue | None = None
    has_base: bool = False

    @property
    def model(self) -> Glm5:
        return self.root.glm

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Biases of routers: whole, on every rank that has the layer."""
        return dict(self.model.named_buffers())


def outline(cfg: ModelConfig, dtype: torch.dtype) -> Glm5:
    """A model without content."""
    with torch.device("meta"):
        return Glm5(cfg).to(dtype)


def build(
    model: Glm5,
    team: Team,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    compute: torch.dtype,
    mtp_depth: int,
    has_base: bool = False,
) -> Part:
    """The rank's part of `model`, which has shapes and no content, and knows which parameters learn; with whatever
    content."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    places = Places(team.mesh, model.cfg, shapes, mtp_depth)
    stage = team.mesh.stage(team.rank)
    keep_stage(model, places, stage, torch.empty(0, dtype=compute, device=team.device))
    queue = defer_linears(model) if parallel.schedule == "zero-bubble" and team.mesh.pipeline > 1 else None
    deal_experts(model, team, gathers=parallel.dispatch == "all-gather")
    root = shard(model.train(), team, places, dtype, dtype if has_base else compute)
    root.to_empty(device=team.device)
    local = local_parameters(model)
    copies = {name: local.pop(name) for name in list(local) if places.stage(name) != stage}
    return Part(root, places, local, copies, dtype, compute, queue, has_base)


@torch.no_grad()
def fill(
    part: Part, rank: int, rows_of: Callable[[str, list[Span]], Tensor], buffer_of: Callable[[str], Tensor]
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
