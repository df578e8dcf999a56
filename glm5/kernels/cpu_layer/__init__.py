"""Decoder layers on a CPU in one call of native code (layer.cpp), and the norms and linear layers around them.

For small models, a layer in torch is a hundred ops of a few microseconds each, most of it overhead. The native layer
computes the model's layer (model spec, section 3) in float32; tests compare it with the torch layers. The result of a
row does not depend on other rows or on the number of threads, bit for bit. Matrices are packed: these are copies, and
who changes the weights makes others.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm5.kernels import native_code
from glm5.kernels.cpu_layer.packed import pack, panels
from glm5.kernels.cpu_layer.structs import (
    Constants,
    LayerStruct,
    PoolStruct,
    Sizes,
    StepStruct,
    Weights,
    layer_struct,
)
from glm5.kernels.dispatch import refuse_gradient

__all__ = [
    "Constants",
    "CpuLayers",
    "HostKeys",
    "HostPools",
    "HostStep",
    "PackedLinear",
    "Sizes",
    "Weights",
    "available",
    "identity",
    "library",
    "num_threads",
    "rms_norm",
    "set_threads",
]

_threads = 1
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


def set_threads(number: int) -> None:
    """The most threads that a call may use, in this process."""
    global _threads
    _threads = number


def num_threads() -> int:
    return _threads


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
            _threads,
            table_BN.data_ptr(),
            request_T.data_ptr(),
            end_T.data_ptr(),
            slot_mapping_T.data_ptr(),
        )


class HostPools:
    """Latents and index keys (None without an indexer) of every layer: float32 pools [P, Z, width] in host memory, with
    any distance between pages and between rows."""

    def __init__(self, latents: Sequence[Tensor], index_keys: Sequence[Tensor | None]):
        self.latents = (PoolStruct * len(latents))(*map(_pool, latents))
        self.index_keys = (PoolStruct * len(latents))(*map(_pool, index_keys))


class HostKeys(NamedTuple):
    """The keys of a step, and whether every row sees so few that all are selected."""

    step: HostStep
    pools: HostPools
    sees_few: bool


def _pool(pool_PZX: Tensor | None) -> PoolStruct:
    if pool_PZX is None:
        return PoolStruct(None, 0, 0)
    if not (pool_PZX.is_cpu and pool_PZX.dtype == torch.float32 and pool_PZX.stride(2) == 1):
        raise ValueError(f"native layers need float32 rows in host memory, got {pool_PZX.dtype} on {pool_PZX.device}")
    return PoolStruct(pool_PZX.data_ptr(), pool_PZX.stride(0), pool_PZX.stride(1))


class PackedLinear:
    """x [..., I] times `weight` [O, I], transposed: [..., O]. float32; TrainingError for a gradient."""

    def __init__(self, weight: Tensor):
        self._weight, self._native = weight, _native()
        self._packed, self._sizes = panels(weight, self._native.glm5_panel()), weight.shape

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        refuse_gradient("cpu_layer.PackedLinear", x, self._weight)
        x, (num_out, width) = x.contiguous(), self._sizes
        y = x.new_empty(*x.shape[:-1], num_out)
        sizes = x.numel() // width, width, num_out, _threads
        self._native.glm5_linear(x.data_ptr(), self._packed.data_ptr(), *sizes, y.data_ptr())
        return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.rms_norm`. float32; TrainingError where a gradient is required."""
    refuse_gradient("cpu_layer.rms_norm", x, weight)
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    _native().glm5_norm(x.data_ptr(), weight.data_ptr(), x.numel() // width, width, eps, y.data_ptr())
    return y


@cache
def _native() -> ctypes.CDLL:
    native = library()
    if native is None:
        raise ValueError("native layers need a C++ compiler; use the torch layers")
    at, count = ctypes.c_void_p, ctypes.c_int32
    layers, step, pools = (ctypes.POINTER(kind) for kind in (LayerStruct, StepStruct, PoolStruct))
    native.glm5_layers.argtypes = [layers, count, step, pools, pools, count, at, count, at, at, at, at]
    native.glm5_linear.argtypes = [at, at, count, count, count, count, at]
    native.glm5_norm.argtypes = [at, at, count, count, ctypes.c_float, at]
    return native


class CpuLayers:
    """Layers, one after the other, over copies of torch's weights, which may be changed then. Raises TrainingError if a
    gradient is required."""

    def __init__(self, sizes: Sequence[Sizes], constants: Constants, weights: Sequence[Weights[Tensor]]):
        native = _native()
        self._run: Callable[..., Any] = native.glm5_layers
        self._weights, self._top_k = tuple(weights), sizes[0].index_topk
        self._routing = sum(size.experts > 0 for size in sizes), sizes[0].active
        places = native.glm5_panel(), native.glm5_lanes()
        self._packed = [pack(size, weight, *places) for size, weight in zip(sizes, weights, strict=True)]
        structs = [layer_struct(size, constants, part) for size, part in zip(sizes, self._packed, strict=True)]
        self._layers = (LayerStruct * len(structs))(*structs)

    @property
    def num_bytes(self) -> int:
        """Of the copies."""
        given = {id(part) for weights in self._weights for part in weights}
        parts = [part for packed in self._packed for part in packed if part is not None and id(part) not in given]
        return sum(part.nbytes for part in parts)

    def __call__(
        self,
        x_TD: Tensor,
        cis_TR2: Tensor,
        keys: HostKeys,
        first: int,
        selected_TK: Tensor | None,
        *,
        is_given: bool,
        recorded: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The last layer's output [T, D] and the keys that it selected or was given, int32 [T, index_topk], or None for
        all visible ones. `cis_TR2`: cos + i sin of RoPE, complex64. `first`: the pool of the first layer.
        `selected_TK`: a selection for the first layer if `is_given`; later layers without an indexer take the one
        before. `recorded` gets the experts of each row, int16 [T, MoE layers, A]."""
        refuse_gradient("a native layer", x_TD, *self._weights)
        x_TD = x_TD.contiguous()
        if not is_given and not keys.sees_few:
            selected_TK = torch.empty(len(x_TD), self._top_k, dtype=torch.int32)
        elif selected_TK is not None:
            selected_TK = selected_TK.contiguous()
        y_TD = torch.empty_like(x_TD)
        where = keys.step.struct, keys.pools.latents, keys.pools.index_keys, first
        given = None if selected_TK is None else selected_TK.data_ptr(), is_given
        experts = None
        if recorded is not None:
            recorded.append(torch.empty(len(x_TD), *self._routing, dtype=torch.int16))
            experts = recorded[-1].data_ptr()
        rows = experts, cis_TR2.data_ptr(), x_TD.data_ptr(), y_TD.data_ptr()
        # A `record_function` takes as long as a norm.
        profiled = torch.autograd.profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
        with torch.profiler.record_function("glm5::decoder_layers") if profiled else nullcontext():
            if self._run(self._layers, len(self._layers), *where, *given, *rows):
                raise MemoryError("native layers: out of memory")
        return y_TD, selected_TK
