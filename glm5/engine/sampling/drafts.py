"""Which drafts are accepted: those that are the very token their row drew, so that output cannot depend on depth.

row 0 of a slot draws t0; row j draws tj assuming drafts d1 .. dj;  d1 is accepted if t0 == d1, d2 if also t1 == d2 ...
new tokens = t0 .. ta, a = number of accepted drafts
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class Accepted(NamedTuple):
    """Per slot: new tokens int64 [Y, 1 + depth] and how many of them count, int64 [Y]; 0 for slots without rows."""

    tokens_Y: Tensor
    count_Y: Tensor


def accept(token_T: Tensor, slot_T: Tensor, offset_T: Tensor, drafts_Y: Tensor) -> Accepted:
    """Tokens that each slot gains in a step. `offset_T`: how many drafts row r assumes, each of 0 .. offset has a row.

    `drafts_Y`: the step's drafts [Y, depth], anything after a slot's own. Padding rows belong to the last slot, which
    gains nothing.
    """
    if token_T.is_cpu:
        return accept_on_host(token_T.numpy(), slot_T.numpy(), offset_T.numpy(), drafts_Y.numpy())
    return accept_on_device(token_T, slot_T, offset_T, drafts_Y)


def accept_on_device(token_T: Tensor, slot_T: Tensor, offset_T: Tensor, drafts_Y: Tensor) -> Accepted:
    """`accept` in static shapes, without waiting for the device."""
    num_slots, depth = drafts_Y.shape
    tokens_Y = token_T.new_zeros(num_slots, depth + 1)
    drawn_Y = torch.zeros(num_slots, depth + 1, dtype=torch.bool, device=token_T.device)
    tokens_Y[slot_T, offset_T] = token_T
    # Not `= True`: that would copy a scalar from the host, which no CUDA graph can hold.
    drawn_Y[slot_T, offset_T] = torch.ones_like(slot_T, dtype=torch.bool)
    drawn_Y[-1].fill_(False)  # noqa: FBT003
    accepted_Y = tokens_Y[:, :-1] == drafts_Y
    alive_Y = drawn_Y.clone()
    alive_Y[:, 1:] &= accepted_Y
    return Accepted(tokens_Y, alive_Y.int().cumprod(dim=1).sum(dim=1))


def accept_on_host(token_T: Ints, slot_T: Ints, offset_T: Ints, drafts_Y: Ints) -> Accepted:
    """`accept` in NumPy, to which arrays this small cost a fraction of what tensors do."""
    num_slots, depth = drafts_Y.shape
    tokens_Y = np.zeros((num_slots, depth + 1), dtype=np.int64)
    alive_Y = np.zeros((num_slots, depth + 1), dtype=np.bool_)
    tokens_Y[slot_T, offset_T] = token_T
    alive_Y[slot_T, offset_T] = True
    alive_Y[-1] = False
    if depth:
        alive_Y[:, 1:] &= tokens_Y[:, :-1] == drafts_Y
        alive_Y = np.logical_and.accumulate(alive_Y, axis=1)
    return Accepted(torch.from_numpy(tokens_Y), torch.from_numpy(np.add.reduce(alive_Y, axis=1, dtype=np.int64)))
