"""Whole tensors on the first rank, one after the other: what writes checkpoints and pushes weights takes them; and the
reverse, a start that the first rank has and all share.

Every rank runs the same sequence; the others send their rows. The first one holds one tensor at a time, or the two of a
layer's experts, on the host.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from glm5.checkpoint.names import slot_of
from glm5.config.tensors import tensor_specs
from glm5.train.parallel.build import ModelShard, put_rows, take_rows
from glm5.train.parallel.row_layout import Span
from glm5.train.parallel.training_group import TrainingGroup

_BIAS = ".e_score_correction_bias"


def parameters_in_order(part: ModelShard) -> list[str]:
    """As a checkpoint's inventory names them first."""
    return list(dict.fromkeys(slot_of(spec.name).parameter for spec in tensor_specs(part.model.cfg)))


@torch.no_grad()
def whole_tensors(
    part: ModelShard, team: TrainingGroup, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor on the host) of every parameter and buffer, in order, or of those of `names`. On other ranks than
    the first nothing comes; they must be run to the end too."""
    mine = _mine(part)
    for name in parameters_in_order(part) if names is None else names:
        holders = _holders(part, team, name)
        if name not in part.places.shapes:
            holders = {min(holders): None}
        if team.rank in holders and not team.is_first:
            dist.send(mine[name].detach().contiguous(), dst=0)
        if team.is_first:
            yield name, _received(part, team, name, mine, holders)


@torch.no_grad()
def spread(part: ModelShard, team: TrainingGroup, whole: Mapping[str, Tensor] | None) -> None:
    """Give every rank its rows of what the first one has; None on the others."""
    biases = [name for name in parameters_in_order(part) if name not in part.places.shapes]
    for name in (*part.places.shapes, *(name for name in biases if name.endswith(_BIAS))):
        holders = _holders(part, team, name)
        if whole is not None:
            for rank, spans in holders.items():
                rows = whole[name] if spans is None else take_rows(whole[name], spans)
                if rank == team.rank:
                    _mine(part)[name].copy_(rows.view_as(_mine(part)[name]))
                else:
                    dist.send(_sendable(rows.to(team.device).contiguous()), dst=rank)
        elif team.rank in holders:
            mine = _mine(part)[name]
            rows = torch.empty_like(mine.data)
            dist.recv(_sendable(rows), src=0)
            mine.copy_(rows)


def _sendable(rows: Tensor) -> Tensor:
    """Values of one byte as bytes, which every kind of group knows."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _mine(part: ModelShard) -> Mapping[str, Tensor]:
    return {**part.local, **part.buffers}


def _holders(part: ModelShard, team: TrainingGroup, name: str) -> dict[int, list[Span] | None]:
    """Ranks that have rows of it, and which; None of a buffer, which all ranks of its stage have."""
    if name not in part.places.shapes:
        first = part.places.stage(name) % team.mesh.pipeline * team.mesh.shards
        return dict.fromkeys(range(first, first + team.mesh.shards))
    return {rank: spans for rank in range(team.mesh.size) if (spans := part.places.spans(name, rank))}


def _received(
    part: ModelShard,
    team: TrainingGroup,
    name: str,
    mine: Mapping[str, Tensor],
    spans_of: Mapping[int, list[Span] | None],
) -> Tensor:
    places, whole = part.places, None
    for rank, spans in spans_of.items():
        if rank == team.rank:
            rows = mine[name].detach()
        else:
            shape, dtype = _expected(part, name, rank)
            rows = torch.empty(shape, dtype=dtype, device=team.device)
            dist.recv(rows, src=rank)
        if spans is None:
            return rows.cpu()
        if whole is None:
            whole = torch.empty(places.shapes[name], dtype=rows.dtype)
        put_rows(whole, spans, rows.cpu())
    assert whole is not None
    return whole


def _expected(part: ModelShard, name: str, rank: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of what `rank` sends."""
    if name in part.places.shapes:
        return part.places.local_shape(name, rank), part.dtype
    # A router's bias, which no cast narrows.
    return (part.model.cfg.n_routed_experts,), torch.promote_types(part.dtype, torch.float32)
