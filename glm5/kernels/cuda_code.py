"""CUDA C++ kernels, for what Triton cannot express: compiled by NVRTC, which torch installs, and launched by the driver
API. No CUDA toolkit is needed. Without NVRTC another implementation is used.
"""

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels.kernel_count import count

logger = logging.getLogger(__name__)

_HEADERS = Path(__file__).parent
_DYNAMIC_SHARED_SIZE, _LARGE_CLUSTERS = 8, 14  # CU_FUNC_ATTRIBUTE_MAX_.._BYTES, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER, _DEPENDENT_LAUNCH = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute. Of the 64 bytes of its value, three ints are used."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 3), ("rest", ctypes.c_char * 52)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class TileMap(ctypes.Structure):
    """CUtensorMap: describes a matrix to the TMA unit, which copies its tiles."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


Given = Tensor | TileMap | int | None
_launches = True


@contextmanager
def not_launched() -> Iterator[None]:
    """In this context kernels are built, but calls do not launch them."""
    global _launches
    _launches = False
    try:
        yield
    finally:
        _launches = True


class CudaKernel:
    """A kernel on the current device. It calls `griddepcontrol.wait` before it reads results of earlier kernels.

    `shared_bytes`: dynamic shared memory of a launch.
    """

    def __init__(self, function: ctypes.c_void_p, shared_bytes: int):
        self._function, self._shared_bytes = function, shared_bytes
        driver = _driver()
        _check(driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED_SIZE, shared_bytes))
        _check(driver.cuFuncSetAttribute(function, _LARGE_CLUSTERS, 1))

    def __call__(self, grid: tuple[int, int], num_threads: int, *given: Given, cluster: int = 1) -> None:
        """Launch on the current stream. Tensors are passed as pointers (None: null), maps by value, ints as 32 bits.

        `cluster`: number of thread blocks of a cluster along the grid's first dimension, up to 16.
        """
        if not _launches:
            return
        values = [_value(each) for each in given]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = self._config(grid, num_threads, cluster)
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, places, None))

    def num_clusters(self, num_threads: int, cluster: int) -> int:
        """How many clusters of two or more thread blocks run at once."""
        count, config = ctypes.c_int(), self._config((cluster, 1), num_threads, cluster)
        _check(_driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(config)))
        return count.value

    def _config(self, grid: tuple[int, int], num_threads: int, cluster: int) -> _Config:
        attributes = (_Attribute * 2)(
            _Attribute(_DEPENDENT_LAUNCH, 0, (1, 0, 0)), _Attribute(_CLUSTER, 0, (cluster, 1, 1))
        )
        return _Config(
            (*grid, 1), (num_threads, 1, 1), self._shared_bytes, torch.cuda.current_stream().cuda_stream,
            attributes, 1 if cluster == 1 else 2,
        )  # fmt: skip


_UNSIGNED_BYTES, _SWIZZLE_128, _FETCH_256 = 0, 3, 3  # CU_TENSOR_MAP_DATA_TYPE_.., _SWIZZLE_.., _L2_PROMOTION_..


@lru_cache(maxsize=1 << 12)
def tile_map(place: int, rows: int, cols: int, tile_rows: int) -> TileMap:
    """Map of a matrix of bytes at the address `place`, for tiles of 128 columns in the layout of `wgmma`.

    `place` and `cols` are multiples of 16.
    """
    return _map(place, (cols, rows), (cols,), (128, tile_rows))


def heads_map(x_THX: Tensor, tile_rows: int) -> TileMap:
    """Map of [T, H, X], for tiles of `tile_rows` rows and 128 bytes of one head; rows past the last are zeros.

    Rows are contiguous. Rows and heads begin at multiples of 16 bytes.
    """
    (rows, heads, width), size = x_THX.shape, x_THX.element_size()
    row_step, head_step, _ = (step * size for step in x_THX.stride())
    return _heads_map(x_THX.data_ptr(), (width * size, rows, heads), (row_step, head_step), (128, tile_rows, 1))


def _map(place: int, sizes: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...]) -> TileMap:
    storage, rank = (ctypes.c_uint64 * 24)(), len(sizes)
    aligned = TileMap.from_buffer(storage, -ctypes.addressof(storage) % 64)
    shape, pitches = (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*steps)
    tile, apart = (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)
    encode, layout = _driver().cuTensorMapEncodeTiled, (0, _SWIZZLE_128, _FETCH_256, 0)
    address = ctypes.c_void_p(place)
    _check(encode(ctypes.byref(aligned), _UNSIGNED_BYTES, rank, address, shape, pitches, tile, apart, *layout))
    return aligned


_heads_map = lru_cache(maxsize=1 << 12)(_map)


def build(source: Path, name: str, shared_bytes: int, device: torch.device, **constants: int) -> CudaKernel:
    """The function `name` of `source`, compiled with `constants` defined, for `device`, where `can_build`.

    Raises RuntimeError with the compiler's log for a source that does not compile.
    """
    compiler = _compiler()
    assert compiler is not None, "no NVRTC, see can_build"
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17", f"--include-path={_HEADERS}"]
    options += [f"-D{constant}={value}" for constant, value in constants.items()]
    image = _compiled(compiler, source, tuple(options))
    count(name)
    with torch.cuda.device(device):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), image))
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        return CudaKernel(function, shared_bytes)


def can_build() -> bool:
    """Whether there is a compiler."""
    return _compiler() is not None


def missing_on(device: torch.device) -> str:
    """What `device` lacks to run Hopper kernels compiled by NVRTC; "" if nothing."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return f"needs Hopper, got {device}"
    return "" if can_build() else "needs NVRTC"


@lru_cache(maxsize=4)  # for several functions of a source
def _compiled(compiler: ctypes.CDLL, source: Path, options: tuple[str, ...]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = source.read_text(encoding="utf-8").encode()
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    compiler.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
    failed = compiler.nvrtcCompileProgram(program, len(options), given)
    result = "ProgramLog" if failed else "CUBIN"
    getattr(compiler, f"nvrtcGet{result}Size")(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    getattr(compiler, f"nvrtcGet{result}")(program, found)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(f"{source.name} does not compile: {found.value.decode(errors='replace')}")
    return found.raw


@cache
def _compiler() -> ctypes.CDLL | None:
    if torch.version.cuda is None:
        return None
    name = f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    beside = sorted((Path(torch.__file__).parents[1] / "nvidia").glob(f"*/lib/{name}"))
    for place in (name, *map(str, beside)):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    logger.warning("%s was not found, so kernels in CUDA C++ are left out: Triton's run in their place", name)
    return None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _value(given: Given) -> ctypes.c_void_p | ctypes.c_int | TileMap:
    if isinstance(given, TileMap):
        return given
    if given is None or isinstance(given, Tensor):
        return ctypes.c_void_p(None if given is None else given.data_ptr())
    return ctypes.c_int(given)


def _check(status: int) -> None:
    if status:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(words))
        raise RuntimeError(f"CUDA driver: {(words.value or b'an unknown error').decode()}")
