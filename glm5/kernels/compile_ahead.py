"""Kernels that work is going to need, compiled before it is done, many at a time.

    with missing() as wanted:    the work runs on nobody's rows: a kernel that is missing is noted down, not launched
        work()
    compile_all(wanted)          in threads: Triton's passes, LLVM and ptxas run outside the interpreter's lock
    work()                       finds every kernel on disk

Compiled kernels lie in Triton's folder on disk, each under a hash of its source and all that it calls, of constants and
argument types, of the target, the options and the compiler itself. So no entry is ever stale: what changes, changes the
name. While kernels are noted down, what they should have written is zeros, so that nothing which reads it as an
index goes astray; the caches and tables that belong to no request yet may hold anything afterwards.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MAX_THREADS = 16
_MAKERS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class Wanted:
    """A kernel of certain argument types and constants: what `triton.compile` asks for."""

    fn: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: Any

    def compile(self) -> None:
        """To disk, if it is not there."""
        import triton
        from triton.compiler import ASTSource

        source = ASTSource(self.fn, self.signature, self.constants, self.attributes)
        triton.compile(source, target=self.target, options=self.options)


@contextmanager
def missing() -> Iterator[list[Wanted]]:
    """Meanwhile kernels that this process has not loaded are noted in the list, once each, and not launched."""
    from triton import knobs

    wanted: list[Wanted] = []
    known: set[tuple[int, Any]] = set()

    def note(**hooked: Any) -> bool:
        function, about = hooked["fn"].jit_function, hooked["compile"]
        if (id(function), about["key"]) not in known:
            known.add((id(function), about["key"]))
            wanted.append(_wanted(function, about))
        return True  # neither compiled nor launched

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with _Zeros():
            yield wanted
    finally:
        knobs.runtime.jit_cache_hook = before


def compile_all(wanted: Sequence[Wanted], num_threads: int, on_done: Callable[[int], None]) -> None:
    """Compile what is not on disk. `on_done` hears how many are done, in this thread. The first error is raised."""
    if not wanted:
        return
    hash_compiler()  # else each of the threads that come first would
    with ThreadPoolExecutor(num_threads, thread_name_prefix="glm5-compile") as threads:
        jobs = [threads.submit(one.compile) for one in wanted]
        try:
            for done, job in enumerate(as_completed(jobs), start=1):
                job.result()
                on_done(done)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def hash_compiler() -> None:
    """Read the compiler's half a gigabyte, once in a process, for the names of entries. Others go on meanwhile."""
    from triton.runtime.cache import triton_key

    triton_key()


def _wanted(function: Any, about: dict[str, Any]) -> Wanted:
    _, _, target, *_ = function.device_caches[about["device"]]
    options = json.loads(about["specialization_data"])["options"]
    # JSON has lists for tuples.
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return Wanted(function, about["signature"], about["constants"], about["configs"][0], options, target)


class _Zeros(TorchDispatchMode):
    """New tensors are zeros where they would be anything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _MAKERS and isinstance(out, torch.Tensor):
            out.zero_()
        return out
