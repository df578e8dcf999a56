"""Activations that are passed on together with their quantized codes, so that the linear layers need not quantize.

blocks    e4m3 under a scale for 128 values, as `act_quant` has it: for FP8 weights in blocks
int8      int8 under a scale a row, as `token_quant` has it: for weights as codes
"""

from typing import Literal

import torch
from torch import Tensor

from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import FP8, num_blocks
from glm5.kernels.token_quant import token_quant

Kind = Literal["blocks", "int8"]
Quantized = tuple[Tensor, Tensor]  # codes [T, D], scales: [T, blocks] with columns in one piece, or [T]
DTYPES: dict[Kind, torch.dtype] = {"blocks": FP8, "int8": torch.int8}


def quantize(x_TD: Tensor, kind: Kind, *, impl: Literal["auto", "reference"] = "auto") -> Quantized:
    return act_quant(x_TD, impl=impl) if kind == "blocks" else token_quant(x_TD, "int8", impl=impl)


def empty_codes(num_rows: int, width: int, kind: Kind | None, device: torch.device) -> Quantized:
    """Uninitialized codes and scales as `quantize` returns them; without rows if `kind` is None."""
    num_rows = num_rows if kind else 0
    codes = torch.empty(num_rows, width, dtype=DTYPES[kind or "blocks"], device=device)
    if kind == "int8":
        return codes, torch.empty(num_rows, dtype=torch.float32, device=device)
    return codes, torch.empty(num_blocks(width), num_rows, dtype=torch.float32, device=device).T
