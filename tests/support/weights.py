"""Weights to quantize: the distributions of the reference table, stacked like experts."""

import torch
from torch import Tensor


def gaussian(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=gen)


def laplace(gen: torch.Generator, *shape: int) -> Tensor:
    u = torch.rand(*shape, generator=gen) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs())


def student_t4(gen: torch.Generator, *shape: int) -> Tensor:
    chi_squared = torch.randn(*shape, 4, generator=gen).square().sum(-1)
    return torch.randn(*shape, generator=gen) / (chi_squared / 4).sqrt()


def bursty(gen: torch.Generator, *shape: int) -> Tensor:
    """Activations: some channels far larger than others, and some tokens."""
    channel = torch.exp(1.2 * torch.randn(*shape[:-2], 1, shape[-1], generator=gen))
    token = torch.exp(0.5 * torch.randn(*shape[:-1], 1, generator=gen))
    return torch.randn(*shape, generator=gen) * channel * token


DISTRIBUTIONS = {"gaussian": gaussian, "laplace": laplace, "t4": student_t4}
