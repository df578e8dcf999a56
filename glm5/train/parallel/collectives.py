"""Collectives with gradients: all-gather, reduce-scatter and all-to-all of rows of different sizes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

Group = dist.ProcessGroup
# torch 2.13 renames them.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(rows: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """All-gather: the rows [sizes[rank], ...] of all ranks, concatenated, on every rank."""
    return _Gather.apply(rows, tuple(sizes), group)


def scatter_sums(rows: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Reduce-scatter: rank r gets its sizes[r] rows of the sum of all ranks' `rows` [sum(sizes), ...]. Sums in
    float32 at least."""
    return _Scatter.apply(rows, tuple(sizes), group)


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """All-to-all: sends `sent[r]` consecutive rows to each rank r, and returns the `received[r]` rows from each."""
    return _Exchange.apply(rows, tuple(sent), tuple(received), group)


def swap(parts: list[Tensor], group: Group) -> list[Tensor]:
    """All-to-all of flat tensors: `parts[r]` goes to rank r. Sizes are exchanged first. Without gradient."""
    device = parts[0].device
    sent = torch.tensor([part.numel() for part in parts], device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    counts = received.tolist()
    out = torch.empty(sum(counts), dtype=parts[0].dtype, device=device)
    dist.all_to_all_single(out, torch.cat(parts), counts, sent.tolist(), group=group)
    return list(out.split(counts))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gathered(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        return _scattered(grad, ctx.sizes, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _scattered(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        return _gathered(grad, ctx.sizes, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _gathered(rows: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
    most = max(sizes)
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: len(rows)] = rows
    out = rows.new_empty(len(sizes) * most, *rows.shape[1:])
    all_gather(out, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(out.split(most), sizes, strict=True)]) if most else out


def _scattered(rows: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
    most, wide = max(sizes), torch.promote_types(rows.dtype, torch.float32)
    padded = rows.new_zeros(len(sizes), most, *rows.shape[1:], dtype=wide)
    for target, part in zip(padded, rows.split(sizes), strict=True):
        target[: len(part)] = part
    out = torch.empty(most, *rows.shape[1:], dtype=wide, device=rows.device)
    if most:
        reduce_scatter(out, padded.flatten(0, 1), group=group)
    return out[: sizes[dist.get_rank(group)]].to(rows.dtype, copy=True)


def _exchanged(rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: Group) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out
