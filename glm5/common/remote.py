"""An object in a process of its own, whose methods this one calls.

    remote = Remote("package.module:Class", *arguments, name="trainer", watchdog_timeout=300)
    remote.call("method", *arguments).result()

    stdin     frames with calls: where it closes, the parent has ended, and the process exits
    stdout    frames with answers, and an empty one every second; what is printed there goes to stderr
    frame     8 bytes of length, then a pickle: pipes join this process to its own child, and nothing else reads them

Calls run one after another in the process's main thread. Those that the class names in `concurrent` have threads of
their own. A process that sends nothing for `watchdog_timeout` seconds is killed; its calls raise ProcessEnded, as they
do however else it ends.
"""

import importlib
import logging
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib.resources import files
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from glm5.common import log
from glm5.common.background import in_background
from glm5.common.errors import GlmError, ProcessEnded, named, reason_of, words_of
from glm5.common.watching import BEAT_SECONDS, Silence, reason_of_exit, reason_of_silence

CLOSED = "it was closed"
START_SECONDS = 60.0  # to the first heartbeat, on a busy machine
CLOSE_SECONDS = 5.0
_LENGTH = struct.Struct(">Q")
_CHUNK = 1 << 20
_BEAT = b""

logger = logging.getLogger(__name__)


class Remote:
    """The parent's side. `ready`: done once the object is made. `launch`: a command that runs another on some machine
    (common/elsewhere.py). Raises OSError if the process cannot be started."""

    def __init__(self, target: str, *args: Any, name: str, watchdog_timeout: float, launch: Sequence[str] = ()) -> None:
        self.name, self._watchdog = name, watchdog_timeout
        home, pipe = Path(str(files("glm5"))).parent, subprocess.PIPE
        command = [*(launch or [sys.executable]), "-m", __name__]
        self.process = subprocess.Popen(command, cwd=home, stdin=pipe, stdout=pipe, process_group=0, bufsize=0)
        self._end = weakref.finalize(self, _kill, self.process)
        self._numbers, self._sending = count(), threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._ended = ""
        threading.Thread(target=_read, args=(weakref.ref(self), self.process, watchdog_timeout), daemon=True).start()
        path = [one or os.getcwd() for one in sys.path]
        level = logging.getLevelName(logging.getLogger("glm5").getEffectiveLevel())
        self.ready = self._ask(os.getcwd(), path, level, log.style(), target, args)

    @property
    def ended(self) -> str:
        """Why the process ended; empty while it runs."""
        return self._ended

    def call(self, method: str, *args: Any) -> "Future[Any]":
        """What the object's method returns; raises GlmError, or ProcessEnded."""
        return self._ask(method, args)

    def _ask(self, *request: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        body = pickle.dumps(request, protocol=5)
        with self._sending:
            number = next(self._numbers)
            self._waiting[number] = future
            with suppress(OSError, ValueError):  # `_read` notices the end
                assert self.process.stdin is not None
                _write(self.process.stdin.write, _LENGTH.pack(len(body)) + body)
        if self._ended:
            self.fail(self._ended)
        return future

    def answer(self, number: int, kind: str | None, value: Any) -> None:
        """What the process says to call `number`: a value, or the class and message of an error."""
        future = self._waiting.pop(number)
        if kind is None:
            future.set_result(value)
        else:
            future.set_exception(named(kind, value))

    def fail(self, reason: str) -> None:
        """The process has ended."""
        self._ended = self._ended or reason
        while self._waiting:
            with suppress(KeyError):
                self._waiting.popitem()[1].set_exception(ProcessEnded(f"{self.name} ended: {self._ended}"))

    def kill(self) -> None:
        """End the process at once, and whatever it started in its group."""
        self._ended = self._ended or CLOSED
        self._end()

    def close(self) -> None:
        """End the process. Closing again does nothing."""
        self._ended = self._ended or CLOSED
        with suppress(OSError), self._sending:
            assert self.process.stdin is not None
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_SECONDS)
        self.kill()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()


def _read(of: "weakref.ref[Remote]", process: "subprocess.Popen[bytes]", watchdog_timeout: float) -> None:
    """Hand out answers until the process ends or is silent for too long."""
    assert process.stdout is not None
    pipe, received = process.stdout.fileno(), bytearray()
    silence = Silence(max(START_SECONDS, watchdog_timeout), watchdog_timeout)
    reason = ""
    while not reason:
        began = time.monotonic()
        if not select.select([pipe], [], [], BEAT_SECONDS)[0]:
            silence.wait(began, BEAT_SECONDS)
            if silence.is_too_long:
                reason = reason_of_silence(process.pid, silence.seconds, watchdog_timeout)
            continue
        silence.end()
        if not (part := os.read(pipe, _CHUNK)):
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_SECONDS)
            reason = reason_of_exit(-signal.SIGKILL if process.returncode is None else process.returncode)
            continue
        received += part
        while (frame := _frame(received)) is not None:
            if frame != _BEAT and (remote := of()) is not None:
                remote.answer(*pickle.loads(frame))
    _kill(process)
    process.stdout.close()
    if (remote := of()) is not None:
        remote.fail(reason)


def _frame(received: bytearray) -> bytes | None:
    """Take the first frame off what was received; None where it is not complete."""
    if len(received) < _LENGTH.size:
        return None
    stop = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    if len(received) < stop:
        return None
    frame = bytes(received[_LENGTH.size : stop])
    del received[:stop]
    return frame


def _write(write: Callable[[memoryview], int | None], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[write(view) or 0 :]


class _Process:
    """The child's side."""

    def __init__(self, calls: int, answers: int) -> None:
        self._calls, self._answers, self._sending = os.fdopen(calls, "rb"), answers, threading.Lock()
        self._numbers = count()
        self._queue: SimpleQueue[tuple[int, str, tuple[Any, ...]]] = SimpleQueue()
        threading.Thread(target=self._beat, daemon=True).start()

    def serve(self) -> NoReturn:
        folder, path, level, style, target, args = self._next()
        with suppress(OSError):
            os.chdir(folder)
        sys.path.extend(one for one in path if one not in sys.path)
        log.configure(level, style)
        module, _, name = target.partition(":")
        made: list[Any] = []
        self._answer(next(self._numbers), lambda: made.append(getattr(importlib.import_module(module), name)(*args)))
        if not made:
            os._exit(1)
        threading.Thread(target=self._receive, args=(made[0],), daemon=True).start()
        while True:
            number, method, given = self._queue.get()
            self._answer(number, lambda method=method, given=given: getattr(made[0], method)(*given))

    def _receive(self, target: Any) -> None:
        concurrent = getattr(target, "concurrent", ())
        while True:
            method, args = self._next()
            number = next(self._numbers)
            if method in concurrent:
                in_background(
                    lambda number=number, method=method, args=args: self._answer(
                        number, lambda: getattr(target, method)(*args)
                    ),
                    method,
                )
            else:
                self._queue.put((number, method, args))

    def _next(self) -> Any:
        head = self._calls.read(_LENGTH.size)
        body = self._calls.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
        if not body:
            os._exit(0)  # the parent has ended; files are replaced atomically, so nothing is cut in half
        return pickle.loads(body)

    def _answer(self, number: int, work: Any) -> None:
        try:
            answer = number, None, work()
        except GlmError as error:
            answer = number, type(error).__name__, words_of(error)
        except BaseException as error:
            logger.exception("a call failed")
            answer = number, GlmError.__name__, reason_of(error)
        self._send(pickle.dumps(answer, protocol=5))

    def _send(self, body: bytes) -> None:
        with self._sending, suppress(OSError):  # the parent has ended
            _write(partial(os.write, self._answers), _LENGTH.pack(len(body)) + body)

    def _beat(self) -> None:
        interval = threading.Event()
        self._send(_BEAT)
        while not interval.wait(BEAT_SECONDS / 2):
            self._send(_BEAT)


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles them, and closes this process
        signal.signal(number, signal.SIG_IGN)
    calls, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _Process(calls, answers).serve()


if __name__ == "__main__":
    main()
