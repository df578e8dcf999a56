"""Random Hadamard rotations, applied with additions only.

    x R = (x H) / sqrt(n) * signs          H a Hadamard matrix of order n, signs random

Order 2^k: Sylvester's construction. Order (q + 1) 2^k with a prime q = 3 mod 4: Paley's construction of order q + 1
times Sylvester's (6144 is 12 times 512). For other orders H is block diagonal with equal blocks. Results of a batch are
bitwise those of its members, because only additions and one multiplication per element are used. In the model,
y = x W^T.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_ROWS = 1 << 16  # rotated at a time, to bound the temporaries of a stack of experts
_MAX_ELEMENTS = 1 << 27  # of a stack that is rotated at once


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix R [n, n]. With a `shift` R is B P B, B block-diagonal Hadamard, P a cyclic shift."""

    size: int
    block: int
    paley: int
    signs: Tensor
    shift: int = 0

    def apply(self, x: Tensor) -> Tensor:
        """x R over the last dimension, in x's dtype."""
        rows, out = x.reshape(-1, self.size), torch.empty_like(x, memory_format=torch.contiguous_format)
        for part, target in zip(rows.split(_ROWS), out.view(-1, self.size).split(_ROWS), strict=True):
            target.copy_(self.apply_to_outputs(part.mT.contiguous()).mT)
        return out

    def apply_to_outputs(self, x: Tensor) -> Tensor:
        """R^T x over the last but one dimension of x [..., n, m]. Additions are vectorised along m."""
        if x.dim() > 2 and x.numel() > _MAX_ELEMENTS:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            for part, target in zip(x, out, strict=True):
                target.copy_(self.apply_to_outputs(part))
            return out
        y = self._blocks(x)
        if self.shift:
            y = self._blocks(y.roll(self.shift, -2))
        return y.mul_(self.signs.to(y).unsqueeze(-1))

    def matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """R itself."""
        return self.apply(torch.eye(self.size, dtype=dtype, device=self.signs.device))

    def _blocks(self, x: Tensor) -> Tensor:
        """Every block of x times the normalised Hadamard matrix."""
        y = x.unflatten(-2, (-1, self.paley, self.block // self.paley))
        y = _paley_product(_sylvester_product(y), self.paley)
        return y.flatten(-4, -2) * self.block**-0.5


def random_hadamard(size: int, seed: int) -> Rotation:
    """A Hadamard matrix of order `size` with random signs; block diagonal where no matrix of that order is known."""
    block, paley = _structure(size)
    return Rotation(size, block, paley, _signs(size, seed))


def shifted_blocks(size: int, block: int = 32) -> Rotation:
    """B P B without signs, as msModelSlim rotates the q latent: blocks of size `block`, shifted by half a block.

    Returns `random_hadamard(size, 0)` where `size` is not a multiple of `block`.
    """
    if size % block:
        return random_hadamard(size, 0)
    return Rotation(size, block, 1, torch.ones(size), shift=block // 2)


def _structure(size: int) -> tuple[int, int]:
    """(order of the Hadamard matrix, order of its Paley factor or 1) for the largest order that divides `size`."""
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
    out, spare = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    while half < size:
        source, target = x.unflatten(-2, (-1, 2, half)), out.unflatten(-2, (-1, 2, half))
        torch.add(source[..., 0, :, :], source[..., 1, :, :], out=target[..., 0, :, :])
        torch.sub(source[..., 0, :, :], source[..., 1, :, :], out=target[..., 1, :, :])
        x, out, spare = out, spare, out
        half *= 2
    return x


def _paley_product(x: Tensor, order: int) -> Tensor:
    """x times the unnormalised Paley matrix over the last but two dimensions."""
    if order == 1:
        return x
    out = torch.empty_like(x)
    for column, target in zip(zip(*_paley(order), strict=True), out.unbind(-3), strict=True):
        torch.mul(x[..., 0, :, :], column[0], out=target)
        for i in range(1, order):
            target.add_(x[..., i, :, :], alpha=column[i])
    return out


@cache
def _paley(order: int) -> tuple[tuple[int, ...], ...]:
    """I + S, S skew-symmetric: quadratic characters of differences modulo q = order - 1, bordered by ones."""
    q = order - 1
    squares = {i * i % q for i in range(1, q)}
    chi = [0] + [1 if i in squares else -1 for i in range(1, q)]
    rows = [[0] + [1] * q] + [[-1] + [chi[(i - j) % q] for j in range(q)] for i in range(q)]
    return tuple(tuple(v + (i == j) for j, v in enumerate(row)) for i, row in enumerate(rows))
