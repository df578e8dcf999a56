"""Runs chat templates: bundled ones in this process, all others in a worker process.

A checkpoint's template may run or write without end. The kernel limits the CPU time and memory of its process, which is
restarted for the next conversation after it was killed. The protocol uses two pipes:

    stdin     8 bytes of length, then a pickled request: first the template's source, then variables
    stdout    T (text) or F (failure), 8 bytes of length, then the text or the error message in UTF-8

The error message continues "chat template NAME".
"""

import pickle
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import jinja2

from glm5.chat.jinja import compile_template
from glm5.common.bounded import MIB
from glm5.common.interrupt import signal_name

MAX_TEXT = 64 * MIB
"""Longest prompt that a template may write, in characters."""
CPU_SECONDS = 10
"""CPU time for one conversation."""
LENGTH = struct.Struct("<q")
TEXT, FAILURE = b"T", b"F"
# What Python raises for a template's own mistakes: missing keys, 1 / 0, endless recursion, ranges and texts too large.
_PYTHON_ERRORS = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError
)  # fmt: skip


class TemplateFailure(Exception):
    """A template that cannot be compiled or cannot render a conversation."""


class Renderer(Protocol):
    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises TemplateFailure."""
        ...


class InProcessTemplate:
    """A template that runs in this process. `is_ours`: it needs no sandbox."""

    def __init__(self, source: str, *, is_ours: bool = False) -> None:
        """Raises TemplateFailure."""
        try:
            self._template = compile_template(source, is_ours=is_ours)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFailure(f", line {error.lineno}: {error.message}") from error
        except _PYTHON_ERRORS as error:  # jinja computes constants such as 1 / 0 while it compiles
            raise TemplateFailure(f" cannot be compiled: {_kind(error)}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            text = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise TemplateFailure(f" refused this conversation: {error}") from error
        except _PYTHON_ERRORS as error:
            raise TemplateFailure(f" cannot render this conversation: {_kind(error)}") from error
        if len(text) > MAX_TEXT:
            raise TemplateFailure(f" writes {len(text)} characters for this conversation; allowed: {MAX_TEXT}")
        return text


class WorkerTemplate:
    """A template that runs in a worker process, for one thread at a time. The worker ends with this object."""

    def __init__(self, source: str, cpu_seconds: int = CPU_SECONDS) -> None:
        """Raises TemplateFailure."""
        self._source, self._cpu_seconds = source, cpu_seconds
        self._turn = threading.Lock()
        self._worker = self._started()

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            request = pickle.dumps(dict(variables), pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, *_PYTHON_ERRORS) as error:
            raise TemplateFailure(f" cannot render this conversation: {_kind(error)}") from error
        with self._turn:
            if self._worker.is_gone:
                self._worker = self._started()
            return self._worker.ask(request)

    def _started(self) -> "_Worker":
        worker = _Worker(self._cpu_seconds)
        worker.ask(pickle.dumps(self._source))
        return worker


class _Worker:
    """One worker process."""

    def __init__(self, cpu_seconds: int) -> None:
        command = [sys.executable, "-m", "glm5.chat.render_worker", str(cpu_seconds)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdin=pipe, stdout=pipe)
        self._cpu_seconds = cpu_seconds
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def is_gone(self) -> bool:
        return not self._end.alive

    def ask(self, request: bytes) -> str:
        """Send a request and return the answer. Any error in between, also Ctrl-C, ends the process."""
        try:
            answer = self._answer(request)
        except BaseException:
            self._end()
            raise
        if answer is None:
            code = self._process.wait()
            self._end()
            if code == -signal.SIGXCPU:
                raise TemplateFailure(f" takes more than {self._cpu_seconds} s of processor time")
            how = signal_name(-code) if code < 0 else f"code {code}"
            raise TemplateFailure(f" brought down the process that runs it ({how})")
        kind, text = answer
        if kind == FAILURE:
            raise TemplateFailure(text)
        return text

    def _answer(self, request: bytes) -> tuple[bytes, str] | None:
        """Kind and text; None from a process that has ended."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        with suppress(BrokenPipeError):
            requests.write(LENGTH.pack(len(request)) + request)
            requests.flush()
        head = answers.read(1 + LENGTH.size)
        if len(head) <= LENGTH.size:
            return None
        size = LENGTH.unpack(head[1:])[0]
        body = answers.read(size)
        return (head[:1], body.decode("utf-8", "surrogatepass")) if len(body) == size else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()


def _kind(error: Exception) -> str:
    """A Python exception in one line; some, such as MemoryError, have no message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
