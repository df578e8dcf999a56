"""ssz in native code (ssz.cpp): on a CPU several times as fast as torch, which reads rows again for every step."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels.native_code import library

_SOURCE = Path(__file__).parent / "ssz.cpp"
_WITHOUT = "torch searches for scales, about four times as long"  # docs/quantize-methods.md


def _search(number: type[ctypes.c_float] | type[ctypes.c_double]) -> type[ctypes.Structure]:
    """`Search` of ssz.cpp for a type of numbers."""

    class Search(ctypes.Structure):
        _fields_ = [
            *((name, ctypes.c_void_p) for name in ("w", "h", "starts")),
            *((name, ctypes.c_int64) for name in ("rows", "width", "rows_per_matrix", "groups", "one_h")),
            *((name, ctypes.c_int) for name in ("num_starts", "steps", "refine")),
            *((name, number) for name in ("quant_min", "quant_max")),
            ("out", ctypes.c_void_p),
        ]

    return Search


_TYPES = {
    torch.float32: (_search(ctypes.c_float), "glm5_ssz_f32"),
    torch.float64: (_search(ctypes.c_double), "glm5_ssz_f64"),
}


def available() -> bool:
    """Whether native code is available. The first call may compile it."""
    return library(_SOURCE, _WITHOUT) is not None


def ssz(
    w_BOGI: Tensor,
    h_BGI: Tensor | None,
    quant_min: float,
    quant_max: float,
    starts: tuple[float, ...],
    steps: int,
    refine: int,
) -> Tensor:
    """As `reference.ssz`; sums are added up in another order, so a scale may differ in its last bits."""
    native = library(_SOURCE, _WITHOUT)
    if native is None or not w_BOGI.is_cpu:
        raise ValueError(f"ssz[native] needs a C++ compiler and tensors on a CPU, got {w_BOGI.device}")
    dtype = torch.promote_types(w_BOGI.dtype, torch.float32)
    make, name = _TYPES[dtype]
    w = w_BOGI.to(dtype).contiguous()
    h = None if h_BGI is None else h_BGI.to(dtype).contiguous()
    B, O, G, I = w.shape
    out_BOG = torch.empty(B, O, G, dtype=dtype)
    first = torch.tensor(starts, dtype=dtype)
    pointers = [w.data_ptr(), 0 if h is None else h.data_ptr(), first.data_ptr()]
    one_h = h is not None and len(h) == 1

    search = make(
        *pointers, B * O * G, I, O * G, G, one_h, len(starts), steps, refine, quant_min, quant_max, out_BOG.data_ptr()
    )
    if getattr(native, name)(ctypes.byref(search), torch.get_num_threads()):
        raise MemoryError("ssz: no memory for a row")
    return out_BOG
