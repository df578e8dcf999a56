"""Kernels in CUDA C++ on a CPU, for tests where there is no GPU: the host's compiler builds them with fibers as
threads (cuda_on_cpu.h). What a GPU's own instructions do is taken from their documentation, so this finds mistakes of
indices and barriers, and a GPU still has the last word."""

import ctypes
import subprocess
from pathlib import Path

from torch import Tensor

from glm5.kernels.native_code import find_compiler

_SECONDS = 60


class Matrix(ctypes.Structure):
    """Stands in for cuda_code.TileMap, as in hopper_on_cpu.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("place", "rows", "cols", "tile_rows")]


class HeadsMatrix(ctypes.Structure):
    """Stands in for cuda_code.heads_map."""

    _fields_ = [
        (name, ctypes.c_uint64) for name in ("place", "width", "rows", "heads", "row_step", "head_step", "tile_rows")
    ]

    def __init__(self, x_THX: Tensor, tile_rows: int):
        (rows, heads, width), size = x_THX.shape, x_THX.element_size()
        row_step, head_step, _ = (step * size for step in x_THX.stride())
        super().__init__(x_THX.data_ptr(), width * size, rows, heads, row_step, head_step, tile_rows)


class OnCpu:
    """Stands in for cuda_code.CudaKernel. `stalls`: seed of warps that stall at random; 0: none."""

    def __init__(self, library: ctypes.CDLL, name: str, stalls: int):
        self._launch, self._kernel, self._stalls = library.launch, getattr(library, name), stalls

    def __call__(
        self,
        grid: tuple[int, int],
        num_threads: int,
        *given: Tensor | ctypes.Structure | int | None,
        cluster: int = 1,
    ) -> None:
        words = (ctypes.c_uint64 * 24)(*map(_word, given))
        self._launch(self._kernel, *grid, num_threads, cluster, words, self._stalls)


def _word(given: Tensor | ctypes.Structure | int | None) -> int:
    if isinstance(given, ctypes.Structure):
        return ctypes.addressof(given)
    return given.data_ptr() if isinstance(given, Tensor) else given or 0


def build(
    source: Path,
    folder: Path,
    name: str,
    constants: dict[str, int],
    header: str = "cuda_on_cpu.h",
    *,
    stalls: int = 0,
) -> OnCpu:
    """The kernel `name` of `source`, built in `folder`."""
    compiler = find_compiler()
    assert compiler is not None, "mark the test `compiler`"
    out = folder / f"{source.stem}-{abs(hash(tuple(constants.items())))}.so"
    if not out.exists():
        options = [f"-D{constant}={value}" for constant, value in constants.items()]
        before = ["-include", str(Path(__file__).with_name(header)), "-I", str(source.parents[1])]
        subprocess.run(
            [compiler, "-O1", "-std=c++20", "-fno-strict-aliasing", "-shared", "-fPIC", "-w", *before, "-x", "c++",
             *options, str(source), "-o", str(out)],
            check=True, timeout=_SECONDS,
        )  # fmt: skip
    return OnCpu(ctypes.CDLL(str(out)), name, stalls)
