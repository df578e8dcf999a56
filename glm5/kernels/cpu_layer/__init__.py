"""A decoder layer on a CPU in one call of native code (layer.cpp), and the norms and linear layers around it.

For small models, a layer in torch is a hundred ops of a few microseconds each, most of it overhead. The native layer
computes the model's layer (model spec, section 3) in float32; tests compare it with the torch layers. The result of a
row does not depend on other rows, bit for bit.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm5.kernels import native_code
from glm5.kernels.cpu_layer.structs import (
    Constants,
    PoolStruct,
    SelectionStruct,
    Sizes,
    StepStruct,
    Weights,
    layer_struct,
)
from glm5.kernels.dispatch import refuse_gradient

__all__ = [
    "Constants",
    "CpuLayer",
    "HostKeys",
    "HostPool",
    "HostStep",
    "Sizes",
    "Weights",
    "available",
    "host_pool",
    "identity",
    "library",
    "linear",
    "rms_norm",
]

HostPool = PoolStruct
_SOURCE = Path(__file__).parent / "layer.cpp"
_WITHOUT = "layers run on torch, at a third to half of the rate"  # docs/bench.md


def library() -> ctypes.CDLL | None:
    """The compiled layer.cpp, or None (native_code.py)."""
    return native_code.library(_SOURCE, _WITHOUT)


def identity() -> str | None:
    """A key of these layers, which differs for layers with other rounding; None without native layers."""
    return native_code.identity(_SOURCE, _WITHOUT)


def available() -> bool:
    """Whether native layers can run here. The first call may compile them."""
    return library() is not None


class HostStep:
    """Rows of a step and their page tables, in host memory.

    `table_BN` int32 pages of each request, `request_T` int32, `end_T` int32 keys that a row sees, `slot_mapping_T`
    int64 slot of its own key (page * page_size + offset).
    """

    def __init__(self, table_BN: Tensor, request_T: Tensor, end_T: Tensor, slot_mapping_T: Tensor, page_size: int):
        self._kept = table_BN, request_T, end_T, slot_mapping_T
        self.struct = StepStruct(
            len(end_T),
            page_size,
            table_BN.stride(0),
            table_BN.shape[1],
            table_BN.data_ptr(),
            request_T.data_ptr(),
            end_T.data_ptr(),
            slot_mapping_T.data_ptr(),
        )


class HostKeys(NamedTuple):
    """The keys of a layer: the step, latents, index keys (None without an indexer), and whether every row sees so few
    keys that all are selected."""

    step: HostStep
    latents: HostPool
    index_keys: HostPool | None
    sees_few: bool


def host_pool(pool_PZX: Tensor) -> HostPool:
    """A float32 pool [P, Z, width] in host memory, which may be strided by page and by row."""
    if not (pool_PZX.is_cpu and pool_PZX.dtype == torch.float32 and pool_PZX.stride(2) == 1):
        raise ValueError(f"native layers need float32 rows in host memory, got {pool_PZX.dtype} on {pool_PZX.device}")
    return HostPool(pool_PZX.data_ptr(), pool_PZX.stride(0), pool_PZX.stride(1))


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x [..., I] times a contiguous weight, transposed: [..., O]. float32; TrainingError for a gradient."""
    refuse_gradient("cpu_layer.linear", x, weight_OI)
    x, (num_out, width) = x.contiguous(), weight_OI.shape
    y = x.new_empty(*x.shape[:-1], num_out)
    sizes = x.numel() // width, width, num_out
    _native().glm5_linear(_at(x), _at(weight_OI), *map(ctypes.c_int32, sizes), _at(y))
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.rms_norm`. float32; TrainingError where a gradient is required."""
    refuse_gradient("cpu_layer.rms_norm", x, weight)
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    sizes = x.numel() // x.shape[-1], x.shape[-1]
    _native().glm5_norm(_at(x), _at(weight), *map(ctypes.c_int32, sizes), ctypes.c_float(eps), _at(y))
    return y


def _native() -> ctypes.CDLL:
    native = library()
    if native is None:
        raise ValueError("native layers need a C++ compiler; use the torch layers")
    return native


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class CpuLayer:
    """A layer over torch's weights, read in place: they may change, but must not be reallocated. Raises TrainingError
    if a gradient is required."""

    def __init__(self, sizes: Sizes, constants: Constants, weights: Weights[Tensor]):
        self._run: Callable[..., Any] = _native().glm5_layer
        self._weights, self._top_k = weights, sizes.index_topk
        self._layer = ctypes.byref(layer_struct(sizes, constants, weights))

    def __call__(
        self, x_TD: Tensor, cis_TR2: Tensor, keys: HostKeys, selected_TK: Tensor | None, *, is_given: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output [T, D] and the selected keys, int32 [T, index_topk], or None for all visible ones.
        `cis_TR2`: cos + i sin of RoPE, complex64. `selected_TK`: another layer's selection if `is_given`."""
        refuse_gradient("a native layer", x_TD, self._weights)
        x_TD = x_TD.contiguous()
        if not is_given and not keys.sees_few:
            selected_TK = torch.empty(len(x_TD), self._top_k, dtype=torch.int32)
        elif selected_TK is not None:
            selected_TK = selected_TK.contiguous()
        y_TD = torch.empty_like(x_TD)
        call = partial(
            self._run,
            self._layer,
            ctypes.byref(keys.step.struct),
            ctypes.byref(keys.latents),
            ctypes.byref(keys.index_keys) if keys.index_keys is not None else None,
            ctypes.byref(SelectionStruct(None if selected_TK is None else selected_TK.data_ptr(), is_given)),
            _at(cis_TR2),
            _at(x_TD),
            _at(y_TD),
        )
        if _traced(call):
            raise MemoryError("native layers: out of memory")
        return y_TD, selected_TK


def _traced(call: Callable[[], int]) -> int:
    """Run `call`, inside a `record_function` only if a profiler is active, as that takes as long as a norm."""
    if not torch.autograd.profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
        return call()
    with torch.profiler.record_function("glm5::decoder_layer"):
        return call()
