"""Whole prompts of ranks that share a model, in two halves of their rows, so that ranks exchange one half while the
attention of the other is computed.

    lane of own rows    added up A, B . . . . . . . added up A . . . added up B .
    lane of all rows    . . . . . . attention of A, attention of B . . . . . . . experts of both

A rank's own rows: what is new added up over ranks, norms, the products and the router that every rank would compute
alike, and what is gathered of it. Of all rows: a rank's heads and its part of every expert, whose weights are read once
for both halves. Rows of B attend to those of A, and none of A to B, so A never waits for B.

Where a graph is captured the lanes are two streams; elsewhere all of it runs in the order in which it is written here,
which is also the order of exchanges on every rank. Memory of one lane that the other reads stays until the lane that it
belongs to has waited for the other: no stream may hand it out again before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor

from glm5.engine.between import Between, Dealt, packed, unpacked
from glm5.engine.lower_layer import LoweredLayer
from glm5.engine.stack import Rows
from glm5.engine.view import StepView
from glm5.kernels.grouped_experts.terms import Terms
from glm5.kernels.row_codes import Kind, quantize
from glm5.model.norm import RMSNorm
from glm5.model.seams import Rope
from glm5.parallel.group import Group

MIN_HALVED_ROWS = 2048  # of fewer, products of half the rows lose what is gained


def suits_halves(between: Between, view: StepView, top_k: int) -> TypeGuard[Dealt]:
    """Whether a step is one of whole prompts, dealt out, of enough rows."""
    if not isinstance(between, Dealt) or view.first_T is None or view.selects(top_k):
        return False
    num_rows = len(view.positions_T)
    return num_rows >= MIN_HALVED_ROWS and num_rows % (2 * between.group.shard.size) == 0


def in_halves(
    layers: Sequence[LoweredLayer], norm: RMSNorm, x_TD: Tensor, rope: Rope, view: StepView, dealt: Dealt
) -> Tensor:
    """The stream behind `layers`, normed, of embedded rows x."""
    lanes, middle = _Lanes(x_TD.device), len(x_TD) // 2
    halves = [
        _Half(rows, dealt, rope.of_rows(rows), view.of_rows(rows), dealt.mine(x_TD[rows]))
        for rows in (slice(0, middle), slice(middle, len(x_TD)))
    ]
    new = None
    for layer in layers:
        new = _layer(layer, new, halves, lanes)
    out = _Gathered(dealt.group, len(x_TD))
    with lanes.own_rows():
        for half in halves:
            out.put(half, half.normed(new, norm, None).x_TD)
    lanes.wait(lanes.mark())
    return out.whole


def _layer(
    layer: LoweredLayer, new: Tensor | Terms | None, halves: Sequence["_Half"], lanes: "_Lanes"
) -> Tensor | Terms:
    """What the layer adds, of this rank a part."""
    attention, mlp, module = layer.attention, layer.mlp, layer.module
    group, num_rows = halves[0].dealt.group, halves[-1].rows.stop
    qkv, marks = _Gathered(group, num_rows), list[torch.cuda.Event | None]()
    with lanes.own_rows():
        for half in halves:
            x = half.normed(new, module.input_layernorm, attention.of_input.wants(num_rows))
            qkv.put(half, attention.of_rows(x, has_key=attention.num_key > 0))
            marks.append(lanes.mark())
    lanes.wait(marks[0])
    keys, outs = attention.prompt_keys(qkv.whole), list[Tensor]()
    parts, own = list[_Gathered](), list[tuple[Rows, *tuple[Tensor, ...]]]()
    for half, mark in zip(halves, marks, strict=True):
        lanes.wait(mark)
        if half is halves[-1] and isinstance(new, Terms):
            new.release()
        outs.append(attention.of_prompt(qkv.whole, keys, half.rows, half.rope, half.view))
        with lanes.own_rows():
            x = half.normed(outs[-1], module.post_attention_layernorm, mlp.wants(num_rows, half.dealt))
            own.append(mlp.of_rows(x))
            tensors = packed(*own[-1])
            parts = parts or [_Gathered(group, num_rows) for _ in tensors]
            for part, tensor in zip(parts, tensors, strict=True):
                part.put(half, tensor)
    lanes.wait(lanes.mark())
    return mlp.of(*unpacked([part.whole for part in parts], *own[0]))


@dataclass
class _Half:
    """`rows` of a pass. `residual_OD`: the residual stream of those of them that are this rank's own."""

    rows: slice
    dealt: Dealt
    rope: Rope
    view: StepView
    residual_OD: Tensor

    def normed(self, new: Tensor | Terms | None, norm: RMSNorm, kind: Kind | None) -> Rows:
        """This rank's own rows, with what is new to them; `new`: of the whole pass, or of the half's rows."""
        if new is None:
            x_OD = norm(self.residual_OD)
            return Rows(x_OD, None if kind is None else quantize(x_OD, kind))
        new = new if new.shape[0] == self.rows.stop - self.rows.start else new[self.rows]
        x, self.residual_OD = self.dealt.join(new, self.residual_OD, norm, kind)
        return x


class _Gathered:
    """Rows of all ranks [num_rows, Y], half by half."""

    def __init__(self, group: Group, num_rows: int):
        self.group, self.num_rows = group, num_rows
        self._whole: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        assert self._whole is not None, f"{self.num_rows=}"
        return self._whole

    def put(self, half: _Half, part_OY: Tensor) -> None:
        """Those of a half, from each rank's share of it."""
        if self._whole is None:
            self._whole = part_OY.new_empty(self.num_rows, part_OY.shape[1])
        self.group.all_gather(part_OY, self._whole[half.rows].unflatten(0, (self.group.shard.size, -1)))


class _Lanes:
    """The current stream, of all rows, and one of a rank's own rows, where a graph is captured."""

    def __init__(self, device: torch.device):
        self._main = self._own = None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._main, self._own = torch.cuda.current_stream(device), _own_stream(device)

    @contextmanager
    def own_rows(self) -> Iterator[None]:
        """Enqueue there, behind everything that is enqueued so far."""
        if self._main is None or self._own is None:
            yield
            return
        self._own.wait_stream(self._main)
        with torch.cuda.stream(self._own):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Where the lane of own rows is now."""
        if self._own is None:
            return None
        mark = torch.cuda.Event()
        mark.record(self._own)
        return mark

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """All rows go on behind a mark."""
        if self._main is not None and mark is not None:
            self._main.wait_event(mark)


@cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    # Its programs are few and the other lane waits for them: they go first where both could run.
    return torch.cuda.Stream(device, priority=-1)
