"""Weights as codes for tests: random ones of every form, and what they stand for in float64."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.block_scaled import FP8
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat
from glm5.kernels.token_quant import token_quant

FORMS = [
    WeightFormat("int8", None, "int8"),
    WeightFormat("int8", None, None),
    WeightFormat("int4", None, "int8"),
    WeightFormat("int4", 128, "fp8"),
    WeightFormat("int4", 64, "int8"),
    WeightFormat("int4", 128, None),
    WeightFormat("int4", None, None),
    WeightFormat("fp8", None, "fp8"),
    WeightFormat("fp8", None, None),
]


def random_quantized(gen: torch.Generator, form: WeightFormat, *shape: int) -> QuantizedWeight:
    """[..., O, I]; products with rows of unit scale have about unit scale."""
    *lead, width = shape
    codes = torch.randint(0, 256, (*lead, width // form.per_byte), dtype=torch.uint8, generator=gen)
    if form.weight == "fp8":
        codes.masked_fill_((codes & 0x7F) == 0x7F, 0)  # the two that are no numbers
    size = {"int8": 74, "int4": 4.6, "fp8": 130}[form.weight]  # root mean square of the values
    scale = (torch.rand(*lead, form.num_scales(width), generator=gen) + 0.5) / (size * width**0.5)
    return QuantizedWeight(
        codes.view({"int8": torch.int8, "int4": torch.uint8, "fp8": FP8}[form.weight]), scale, form
    ).check()


def met(x: Tensor, form: WeightFormat) -> Tensor:
    """Rows as the weight meets them, in float64."""
    if form.act is None:
        return x.double()
    codes, scale = token_quant(x, form.act, impl="reference")
    return codes.double() * scale.double()[:, None]


def exact_linear(x: Tensor, weight: QuantizedWeight) -> Tensor:
    return met(x, weight.format) @ weight.dequantize(torch.float64).T


class QuantizedCase(NamedTuple):
    """Arguments of `quantized_experts`."""

    x: Tensor
    gate_up: QuantizedWeight
    down: QuantizedWeight
    weight: Tensor
    expert: Tensor

    def to(self, device: str, dtype: torch.dtype) -> "QuantizedCase":
        def move(weight: QuantizedWeight) -> QuantizedWeight:
            return QuantizedWeight(weight.codes.to(device), weight.scale.to(device), weight.format)

        x = self.x.to(device, dtype)
        return QuantizedCase(x, move(self.gate_up), move(self.down), self.weight.to(device), self.expert.to(device))


def quantized_case(T: int, E: int, A: int, D: int, ffn: int, form: WeightFormat, gen: torch.Generator) -> QuantizedCase:
    """Every expert's choice is uniform, without repetition."""
    expert = torch.stack([torch.randperm(E, generator=gen)[:A] for _ in range(T)]).int().sort(dim=-1).values
    return QuantizedCase(
        torch.randn(T, D, generator=gen),
        random_quantized(gen, form, E, 2 * ffn, D),
        random_quantized(gen, form, E, D, ffn),
        torch.rand(T, A, generator=gen),
        expert.contiguous(),
    )


def exact_experts(case: QuantizedCase) -> Tensor:
    """In float64; what down is given is rounded to x's dtype before it is quantized, as everywhere."""
    out = torch.zeros_like(case.x, dtype=torch.float64)
    for e in range(len(case.down.codes)):
        share = torch.where(case.expert == e, case.weight, 0.0).double().sum(-1)
        rows = share.nonzero()[:, 0]
        if len(rows):
            gate, up = exact_linear(case.x[rows], case.gate_up.of(e)).chunk(2, dim=-1)
            h = (F.silu(gate) * up).to(case.x.dtype)
            out[rows] += exact_linear(h, case.down.of(e)) * share[rows, None]
    return out
