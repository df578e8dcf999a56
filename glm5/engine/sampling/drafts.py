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
    """Per slot: new tokens int64 [S, J] and how many of them count, int64 [S]; 0 for slots without rows."""

    token_SJ: Tensor
    count_S: Tensor


def accept(token_R: Tensor, slot_R: Tensor, offset_R: Tensor, draft_SK: Tensor) -> Accepted:
    """Tokens that each slot gains in a step. `offset_R`: how many drafts row r assumes, each of 0 .. offset has a row.

    `draft_SK`: the step's drafts [S, K], anything after a slot's own. Padding rows belong to the last slot, which
    gains nothing.
    """
    if token_R.is_cpu:
        return accept_on_host(token_R.numpy(), slot_R.numpy(), offset_R.numpy(), draft_SK.numpy())
    return accept_on_device(token_R, slot_R, offset_R, draft_SK)


def accept_on_device(token_R: Tensor, slot_R: Tensor, offset_R: Tensor, draft_SK: Tensor) -> Accepted:
    """`accept` in static shapes, without waiting for the device."""
    num_slots, depth = draft_SK.shape
    token_SJ = token_R.new_zeros(num_slots, depth + 1)
    drawn_SJ = torch.zeros(num_slots, depth + 1, dtype=torch.bool, device=token_R.device)
    token_SJ[slot_R, offset_R] = token_R
    # Not `= True`: that would copy a scalar from the host, which no CUDA graph can hold.
    drawn_SJ[slot_R, offset_R] = torch.ones_like(slot_R, dtype=torch.bool)
    drawn_SJ[-1].fill_(False)  # noqa: FBT003
    accepted_SK = token_SJ[:, :-1] == draft_SK
    alive_SJ = drawn_SJ.clone()
    alive_SJ[:, 1:] &= accepted_SK
    return Accepted(token_SJ, alive_SJ.int().cumprod(dim=1).sum(dim=1))


def accept_on_host(token_R: Ints, slot_R: Ints, offset_R: Ints, draft_SK: Ints) -> Accepted:
    """`accept` in NumPy, to which arrays this small cost a fraction of what tensors do."""
    num_slots, depth = draft_SK.shape
    token_SJ = np.zeros((num_slots, depth + 1), dtype=np.int64)
    alive_SJ = np.zeros((num_slots, depth + 1), dtype=np.bool_)
    token_SJ[slot_R, offset_R] = token_R
    alive_SJ[slot_R, offset_R] = True
    alive_SJ[-1] = False
    if depth:
        alive_SJ[:, 1:] &= token_SJ[:, :-1] == draft_SK
        alive_SJ = np.logical_and.accumulate(alive_SJ, axis=1)
    return Accepted(torch.from_numpy(token_SJ), torch.from_numpy(np.add.reduce(alive_SJ, axis=1, dtype=np.int64)))
