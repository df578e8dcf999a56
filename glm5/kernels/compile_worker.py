"""Compiles kernels to Triton's folder on disk: `python -m glm5.kernels.compile_worker NUMBER`, started by `Compilers`.

    stdin     orders: the length of one in 8 bytes, then the kernels, pickled; at its end this process ends
    stdout    a line of JSON for each kernel as it is done: {"error": null, or what went wrong}

The process itself only imports the compiler and the kernels' modules. For every order it forks NUMBER others, which
take kernels from a pipe. It never uses a GPU, because forked processes could not use CUDA then.
"""

import importlib
import io
import json
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

_LENGTH = struct.Struct("<q")
_INDEX = struct.Struct("<i")
_MAX_ERROR = 1500  # characters; a write to a pipe is atomic below the size of a page


@dataclass(frozen=True)
class CompileJob:
    """The arguments of `triton.compile` for a kernel. `fn` is pickled by module and name."""

    fn: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: Any

    def compile(self) -> None:
        """Compile to disk unless it is there."""
        import triton
        from triton.compiler import ASTSource

        source = ASTSource(self.fn, self.signature, self.constants, self.attributes)
        triton.compile(source, target=self.target, options=self.options)


def packed(jobs: Sequence[CompileJob]) -> bytes:
    """The bytes of an order."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(list(jobs))
    return _LENGTH.pack(len(buffer.getvalue())) + buffer.getvalue()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        from triton.runtime.jit import JITFunction

        return (obj.fn.__module__, obj.fn.__qualname__) if isinstance(obj, JITFunction) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str]) -> Any:
        module, name = pid
        return getattr(importlib.import_module(module), name)


def main(number: int) -> NoReturn:
    """Serve orders until there are no more."""
    answers = os.dup(1)
    os.dup2(2, 1)  # output of the compiler goes to stderr
    import triton  # noqa: F401  # pyright: ignore[reportUnusedImport] - slow, so done before the first order
    from triton.runtime.cache import triton_key

    triton_key()
    orders = os.fdopen(0, "rb")
    while head := orders.read(_LENGTH.size):
        jobs = _Unpickler(io.BytesIO(orders.read(_LENGTH.unpack(head)[0]))).load()
        _compile_all(jobs, min(number, len(jobs)), answers)
    os._exit(0)


def _compile_all(jobs: Sequence[CompileJob], number: int, answers: int) -> None:
    take, give = os.pipe()
    children: list[int] = []
    for _ in range(number):
        if not (pid := os.fork()):
            os.close(give)
            _compile_jobs(jobs, take, answers)
        children.append(pid)
    os.close(take)
    with os.fdopen(give, "wb") as queue:
        queue.write(b"".join(_INDEX.pack(index) for index in range(len(jobs))))
    for pid in children:
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            _answer(answers, f"a process that compiled ended with code {code}")


def _compile_jobs(jobs: Sequence[CompileJob], take: int, answers: int) -> NoReturn:
    try:
        while taken := os.read(take, _INDEX.size):
            try:
                jobs[_INDEX.unpack(taken)[0]].compile()
            except Exception:  # noqa: BLE001 - reported to the parent
                _answer(answers, traceback.format_exc()[-_MAX_ERROR:])
            else:
                _answer(answers, None)
    finally:
        os._exit(0)


def _answer(answers: int, error: str | None) -> None:
    os.write(answers, json.dumps({"error": error}).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
