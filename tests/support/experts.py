"""Experts in FP8 for tests of `grouped_experts`: random weights, choices, and the sum they stand for in float64."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.block_scaled import BlockScaled, quantize_blocks
from glm5.kernels.grouped_experts import SharedExpert


class ExpertCase(NamedTuple):
    """Arguments of `grouped_experts`, and a shared expert."""

    x: Tensor
    gate_up: BlockScaled
    down: BlockScaled
    weight: Tensor
    expert: Tensor
    shared: SharedExpert

    def to(self, device: str, dtype: torch.dtype) -> "ExpertCase":
        """The same on `device`, x in `dtype`."""

        def move(weight: BlockScaled) -> BlockScaled:
            return BlockScaled(weight.data.to(device), weight.scale.to(device))

        return ExpertCase(
            self.x.to(device, dtype),
            move(self.gate_up),
            move(self.down),
            self.weight.to(device),
            self.expert.to(device),
            SharedExpert(*(move(w) for w in self.shared)),
        )


def make_experts(T: int, E: int, A: int, D: int, ffn: int, gen: torch.Generator) -> ExpertCase:
    """Weights that keep values at unit scale; every expert's choice is uniform, without repetition."""

    def weights(*shape: int) -> BlockScaled:
        return quantize_blocks(torch.randn(*shape, generator=gen) * shape[-1] ** -0.5)

    gate, up = weights(E, ffn, D), weights(E, ffn, D)
    stacked = BlockScaled(torch.cat([gate.data, up.data], 1), torch.cat([gate.scale, up.scale], 1))
    expert = torch.stack([torch.randperm(E, generator=gen)[:A] for _ in range(T)]).int().sort(dim=-1).values
    shared = SharedExpert(weights(ffn, D), weights(ffn, D), weights(D, ffn))
    x = torch.randn(T, D, generator=gen)
    return ExpertCase(x, stacked, weights(E, D, ffn), torch.rand(T, A, generator=gen), expert.contiguous(), shared)


def plain(case: ExpertCase, dtype: torch.dtype) -> ExpertCase:
    """The same with plain weights."""

    def dense(weight: BlockScaled) -> Tensor:
        return weight.dequantize(torch.float32).to(dtype)

    def stacked(weight: BlockScaled) -> Tensor:
        return torch.stack([dense(BlockScaled(*pair)) for pair in zip(*weight, strict=True)])

    return case._replace(
        x=case.x.to(dtype),
        gate_up=torch.cat([stacked(half) for half in case.gate_up.split_gate_up()], dim=1),
        down=stacked(case.down),
        shared=SharedExpert(*map(dense, case.shared)),
    )


def exact_sum(case: ExpertCase, *, with_shared: bool) -> Tensor:
    """What the weights stand for, in float64, expert by expert; nothing is quantized or rounded on the way."""
    x = case.x.double()
    gate, up = case.gate_up.split_gate_up()
    out = torch.zeros_like(x)
    for e in range(len(case.down.data)):
        share = torch.where(case.expert == e, case.weight, 0.0).double().sum(-1)
        rows = share.nonzero()[:, 0]
        if len(rows):
            ws = (BlockScaled(w.data[e], w.scale[e]) for w in (gate, up, case.down))
            out[rows] += _expert(x[rows], *ws) * share[rows, None]
    return out + _expert(x, *case.shared) if with_shared else out


def _expert(x: Tensor, *weights: BlockScaled) -> Tensor:
    gate, up, down = (w.dequantize(torch.float64) for w in weights)
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
