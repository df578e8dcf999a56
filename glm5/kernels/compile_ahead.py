"""Compiles the Triton kernels of some work ahead of it, many in parallel.

    with missing() as wanted:    dry run on padding rows: kernels that are not loaded are recorded, none is launched
        work()
    compilers.compile(wanted)    in processes (compile_worker.py), because half of a compilation holds the GIL
    work()                       finds every kernel on disk

Compiled kernels are in Triton's cache on disk under a hash of the source with its callees, constants, argument types,
target, options and compiler, so no entry is ever stale. During the dry run new tensors are zeros, so that outputs which
are used as indices stay in range; caches and tables may hold anything afterwards. CUDA C++ kernels are not launched
either: what one sends to other GPUs would stay there, as the receiving kernel is not launched.

(16 threads of one process took 18.7 s for 180 kernels on a machine of 16 cores; one after the other they take 0.28 s
each.)
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glm5.common.errors import GlmError
from glm5.kernels.compile_worker import CompileJob, packed
from glm5.kernels.cuda_code import not_launched

_MAKERS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_LEAVE_SECONDS = 5.0


@contextmanager
def missing() -> Iterator[list[CompileJob]]:
    """In this context Triton kernels that this process has not loaded are appended to the list, once each, and not
    launched; CUDA C++ kernels are built and not launched."""
    from triton import knobs

    jobs: list[CompileJob] = []
    seen: set[tuple[int, Any]] = set()

    def note(**hooked: Any) -> bool:
        function, about = hooked["fn"].jit_function, hooked["compile"]
        if (id(function), about["key"]) not in seen:
            seen.add((id(function), about["key"]))
            jobs.append(_compile_job(function, about))
        return True  # neither compiled nor launched

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with not_launched(), _Zeros():
            yield jobs
    finally:
        knobs.runtime.jit_cache_hook = before


class Compilers:
    """`number` compiler processes, forked from one that imports the compiler first: start it early."""

    def __init__(self, number: int):
        command = [sys.executable, "-m", "glm5.kernels.compile_worker", str(number)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdin=pipe, stdout=pipe)

    def compile(self, jobs: Sequence[CompileJob], on_done: Callable[[int], None]) -> None:
        """Compile kernels that are not on disk. `on_done` gets the number done. Raises GlmError for the first
        failure."""
        if not jobs:
            return
        orders, answers = self.process.stdin, self.process.stdout
        assert orders is not None
        assert answers is not None
        with suppress(BrokenPipeError):  # it has ended, which the answers show
            orders.write(packed(jobs))
            orders.flush()
        for done in range(1, len(jobs) + 1):
            line = answers.readline()
            error = json.loads(line)["error"] if line else "the compiler's process has ended; its words are above"
            if error is not None:
                raise GlmError(f"a GPU kernel could not be compiled: {error}")
            on_done(done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def hash_compiler() -> None:
    """Hash the compiler's files (0.5 GB), which cache keys need once per process. Releases the GIL meanwhile."""
    from triton.runtime.cache import triton_key

    triton_key()


def _compile_job(function: Any, about: dict[str, Any]) -> CompileJob:
    _, _, target, *_ = function.device_caches[about["device"]]
    options = json.loads(about["specialization_data"])["options"]
    # JSON turns tuples into lists.
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return CompileJob(function, about["signature"], about["constants"], about["configs"][0], options, target)


class _Zeros(TorchDispatchMode):
    """Makes uninitialized tensors zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _MAKERS and isinstance(out, torch.Tensor):
            out.zero_()
        return out
