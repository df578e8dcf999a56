"""Common parts of Triton implementations. Triton is imported only by `triton*.py` files, when they are chosen; without
it other implementations are used.

Most kernels are forward only, for inference. No shape, grid or host read depends on data, so CUDA graphs can capture
them. They are deterministic: sums are split and combined in a fixed order.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.common.writable import try_to_write

NUM_ARRIVALS = 1 << 14


@cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def check_kernel_cache() -> None:
    """Raises ConfigError where Triton's folder neither holds kernels nor can take any: it compiles none then."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            try_to_write(folder)
    except OSError as error:
        raise ConfigError(
            f"compiled kernels cannot be kept in {folder} ({error.strerror}); set TRITON_CACHE_DIR to a folder that "
            "can be written"
        ) from None


def chosen(*tensors: Tensor) -> bool:
    """Whether Triton kernels without a gradient take them: none in float64, and no gradient required."""
    if tensors[0].is_cpu or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return False
    return all(t.dtype != torch.float64 and supports(t.device) for t in tensors)


@cache
def supports(device: torch.device) -> bool:
    """Whether Triton is installed, and the GPU has FP8 matrix units and the 227 KB of shared memory that tiles need:
    H100, H200, B200."""
    return device.type == "cuda" and installed() and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def multiprocessors(device: torch.device) -> int:
    """The GPU's number of multiprocessors; on a CPU, a number for tests."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def arrivals(device: torch.device) -> Tensor:
    """int32 zeros in which programs of a launch count arrivals; the last program resets its counter to zero.

    For kernels of one stream at a time. Made outside CUDA graphs: run a kernel once before capturing it.
    """
    with torch.inference_mode(mode=False):
        return torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=device)


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that begins while the one before it ends.

    Such a kernel has a constexpr parameter PDL, under which every program calls `gdc_wait` before it touches what
    earlier kernels wrote or read (weights excepted), and `gdc_launch_dependents` once its own loads are on their way.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
