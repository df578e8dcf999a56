"""Gathers unsharded tensors on the first rank, for checkpoints and weight updates, and scatters initial weights.

All ranks must iterate over the same sequence. The first rank holds one tensor at a time on the host, or the two stacked
tensors of a layer's experts.
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
    """Names of the model's parameters in the order of a checkpoint's inventory."""
    return list(dict.fromkeys(slot_of(spec.name).parameter for spec in tensor_specs(part.model.cfg)))


@torch.no_grad()
def gather_tensors(
    part: ModelShard, team: TrainingGroup, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor on the host) of every parameter and buffer in order, or of `names`. Yields only on the first rank;
    the others must iterate, too."""
    own_tensors = _own_tensors(part)
    for name in parameters_in_order(part) if names is None else names:
        owners = _owners(part, team, name)
        if name not in part.layout.shapes:
            owners = {min(owners): None}
        if team.rank in owners and not team.is_first:
            dist.send(own_tensors[name].detach().contiguous(), dst=0)
        if team.is_first:
            yield name, _received(part, team, name, own_tensors, owners)


@torch.no_grad()
def scatter_tensors(part: ModelShard, team: TrainingGroup, whole: Mapping[str, Tensor] | None) -> None:
    """Send each rank its rows of the first rank's tensors `whole`, which is None on the other ranks."""
    biases = [name for name in parameters_in_order(part) if name not in part.layout.shapes]
    for name in (*part.layout.shapes, *(name for name in biases if name.endswith(_BIAS))):
        owners = _owners(part, team, name)
        if whole is not None:
            for rank, spans in owners.items():
                rows = whole[name] if spans is None else take_rows(whole[name], spans)
                if rank == team.rank:
                    _own_tensors(part)[name].copy_(rows.view_as(_own_tensors(part)[name]))
                else:
                    dist.send(_as_bytes(rows.to(team.device).contiguous()), dst=rank)
        elif team.rank in owners:
            own_tensors = _own_tensors(part)[name]
            rows = torch.empty_like(own_tensors.data)
            dist.recv(_as_bytes(rows), src=0)
            own_tensors.copy_(rows)


def _as_bytes(rows: Tensor) -> Tensor:
    """One-byte dtypes as uint8, which all backends can send."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _own_tensors(part: ModelShard) -> Mapping[str, Tensor]:
    return {**part.local, **part.buffers}


def _owners(part: ModelShard, team: TrainingGroup, name: str) -> dict[int, list[Span] | None]:
    """Ranks that hold the tensor, with their spans; None for a buffer, which is replicated in its stage."""
    if name not in part.layout.shapes:
        first = part.layout.stage(name) % team.mesh.pipeline * team.mesh.shards
        return dict.fromkeys(range(first, first + team.mesh.shards))
    return {rank: spans for rank in range(team.mesh.size) if (spans := part.layout.spans(name, rank))}


def _received(
    part: ModelShard,
    team: TrainingGroup,
    name: str,
    own_tensors: Mapping[str, Tensor],
    spans_of: Mapping[int, list[Span] | None],
) -> Tensor:
    layout, whole = part.layout, None
    for rank, spans in spans_of.items():
        if rank == team.rank:
            rows = own_tensors[name].detach()
        else:
            shape, dtype = _expected_rows(part, name, rank)
            rows = torch.empty(shape, dtype=dtype, device=team.device)
            dist.recv(rows, src=rank)
        if spans is None:
            return rows.cpu()
        if whole is None:
            whole = torch.empty(layout.shapes[name], dtype=rows.dtype)
        put_rows(whole, spans, rows.cpu())
    assert whole is not None
    return whole


def _expected_rows(part: ModelShard, name: str, rank: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the rows that `rank` sends."""
    if name in part.layout.shapes:
        return part.layout.local_shape(name, rank), part.dtype
    # A router's bias, which stays in float32.
    return (part.model.cfg.n_routed_experts,), torch.promote_types(part.dtype, torch.float32)
