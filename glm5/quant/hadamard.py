"""Orthogonal matrices that spread every input over all outputs, applied by additions.

    x R = (x H) / sqrt(n) * signs          H a Hadamard matrix of order n, signs random

Order 2^k: Sylvester's. Order (q + 1) 2^k, q a prime that is 3 mod 4: Paley's of order q + 1 times Sylvester's (6144 is
12 times 512). Where an order has neither: as many equal blocks as it takes. Only additions and one multiplication
by element: a batch gives its members' bits. x is last in every product of the model: y = x W^T.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_ROWS = 1 << 16  # rotated at a time: a stack of experts would be held several times over
_MOST = 1 << 27  # elements of a stack that is rotated at once


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix R [n, n]. `shift`: R is B P B instead, B blocks of Hadamard matrices, P a cyclic shift."""

    size: int
    block: int
    paley: int
    signs: Tensor
    shift: int = 0

    def apply(self, x: Tensor) -> Tensor:
        """x R over the last dimension, in x's dtype."""
        rows, out = x.reshape(-1, self.size), torch.empty_like(x, memory_format=torch.contiguous_format)
        for part, into in zip(rows.split(_ROWS), out.view(-1, self.size).split(_ROWS), strict=True):
            into.copy_(self.apply_to_outputs(part.mT.contiguous()).mT)
        return out

    def apply_to_outputs(self, x: Tensor) -> Tensor:
        """R^T x over the last but one dimension of x [..., n, m]. Additions run along m, wherever a row lies."""
        if x.dim() > 2 and x.numel() > _MOST:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            for part, into in zip(x, out, strict=True):
                into.copy_(self.apply_to_outputs(part))
            return out
        y = self._blocks(x)
        if self.shift:
            y = self._blocks(y.roll(self.shift, -2))
        return y.mul_(self.signs.to(y).unsqueeze(-1))

    def matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """R itself."""
        return self.apply(torch.eye(self.size, dtype=dtype, device=self.signs.device))

    def _blocks(self, x: Tensor) -> Tensor:
        """Every block of x times the Hadamard matrix, normalised."""
        y = x.unflatten(-2, (-1, self.paley, self.block // self.paley))
        y = _paley_product(_sylvester_product(y), self.paley)
        return y.flatten(-4, -2) * self.block**-0.5


def random_hadamard(size: int, seed: int) -> Rotation:
    """A Hadamard matrix of order `size` with random signs, or blocks of the largest one that there is."""
    block, paley = _structure(size)
    return Rotation(size, block, paley, _signs(size, seed))


def shifted_blocks(size: int, block: int = 32) -> Rotation:
    """B P B without signs, as msModelSlim turns the q latent: `block` neighbours, a shift by half of that, again."""
    if size % block:
        return random_hadamard(size, 0)
    return Rotation(size, block, 1, torch.ones(size), shift=block // 2)


def _structure(size: int) -> tuple[int, int]:
    """(order of the Hadamard matrix, its factor that is Paley's or 1) for the largest order that divides `size`."""
    odd = size
    while odd % 2 == 0:
        odd //= 2
    if odd == 1:
        return size, 1
    paley = odd * 4
    while size % paley == 0:
        if _is_prime(paley - 1):
            return size, paley
        paley *= 2
    return size // odd, 1


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _signs(size: int, seed: int) -> Tensor:
    bits = torch.randint(2, (size,), generator=torch.Generator().manual_seed(seed), device="cpu")
    return bits.mul_(2).sub_(1).float()


def _sylvester_product(x: Tensor) -> Tensor:
    """x times the unnormalised Sylvester matrix over the last but one dimension, a power of two."""
    size, half = x.shape[-2], 1
    room, other = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    while half < size:
        of, into = x.unflatten(-2, (-1, 2, half)), room.unflatten(-2, (-1, 2, half))
        torch.add(of[..., 0, :, :], of[..., 1, :, :], out=into[..., 0, :, :])
        torch.sub(of[..., 0, :, :], of[..., 1, :, :], out=into[..., 1, :, :])
        x, room, other = room, other, room
        half *= 2
    return x


def _paley_product(x: Tensor, order: int) -> Tensor:
    """x times the unnormalised Paley matrix over the last but two dimensions."""
    if order == 1:
        return x
    out = torch.empty_like(x)
    for column, into in zip(zip(*_paley(order), strict=True), out.unbind(-3), strict=True):
        torch.mul(x[..., 0, :, :], column[0], out=into)
        for i in range(1, order):
            into.add_(x[..., i, :, :], alpha=column[i])
    return out


@cache
def _paley(order: int) -> tuple[tuple[int, ...], ...]:
    """I + S, S skew: a border of ones around the quadratic characters of differences modulo q = order - 1."""
    q = order - 1
    squares = {i * i % q for i in range(1, q)}
    chi = [0] + [1 if i in squares else -1 for i in range(1, q)]
    rows = [[0] + [1] * q] + [[-1] + [chi[(i - j) % q] for j in range(q)] for i in range(q)]
    return tuple(tuple(v + (i == j) for j, v in enumerate(row)) for i, row in enumerate(rows))
