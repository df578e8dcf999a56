"""Dtypes by the names people type, and casts that round once."""

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.kernels.block_scaled import round_once

NAMED_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
}


def parse_dtype(dtype: str | torch.dtype, special: tuple[str, ...] = ()) -> torch.dtype:
    """The torch.dtype of a name; `special` are further words that the caller allows and has handled."""
    if isinstance(dtype, torch.dtype) and dtype in NAMED_DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in NAMED_DTYPES:
        return NAMED_DTYPES[dtype]
    raise ConfigError(f"dtype: got {dtype}; allowed: {', '.join((*special, *NAMED_DTYPES))}")


def dtype_name(dtype: torch.dtype) -> str:
    """The config's spelling: torch.bfloat16 -> 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, rounded once (torch rounds float64 to 16 bits through float32, that is twice)."""
    return round_once(tensor, dtype) if tensor.dtype == torch.float64 else tensor.to(dtype)
