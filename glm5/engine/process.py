"""The engine process: `python -m glm5.engine.process FOLDER CWD`, started by `link.ProcessLink` and by nobody else.

    FOLDER    two ZMQ sockets, MessagePack: what to do comes in, what was computed goes out
    stdin     a pipe that is never written to: when it ends, the parent has ended, and so does this process
    stdout    a pipe for signs of life and last words, JSON lines: no socket has to be flushed for them to arrive
    stderr    the parent's

It ends with code 0 when it is told to close, 1 after an exception, and those of `failure` otherwise.
"""

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Protocol

import msgspec
import zmq

from glm5.common import log
from glm5.common.errors import GlmError
from glm5.engine.failure import HUNG, LOST, ORPHANED, reason_of, words_of
from glm5.engine.wire import Beat, Close, Dead, Loading, Ready, Start, ToEngine

logger = logging.getLogger(__name__)

INBOX, OUTBOX = "to-engine", "to-client"
BEAT_SECONDS = 1.0
_MAX_REASON = 2000  # characters; what is shorter than a page is written to a pipe as a whole or not at all
_FLUSH_MS = 5000  # for the last answers, once told to close

Progress = Callable[[str, float], None]


def main(folder: str, cwd: str) -> NoReturn:
    """Serve until told to close. Ends the process in every case."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's, which ends this in order: a terminal or a service
        signal.signal(number, signal.SIG_IGN)  # manager may send them to both
    heartbeat = Heartbeat(take_stdout())
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    with suppress(OSError):  # started elsewhere so that nothing there is imported by mistake
        os.chdir(cwd)
    started = False
    try:
        context = zmq.Context()
        inbox, outbox = _Inbox(context, folder), _Outbox(context, folder)
        start = inbox.start()
        log.configure(start.log_level, start.log_style)
        heartbeat.start(start.config["watchdog_timeout"])
        core = _build(start, lambda phase, share: outbox.send(Loading(phase, share)), heartbeat)
        gc.collect()
        gc.freeze()  # what was loaded stays; no collection needs to look at it again
        outbox.send(Ready(core.facts))
        started = True
        _serve(core, inbox, outbox, heartbeat)
        inbox.close()
        outbox.close()
        context.term()
    except BaseException as error:  # the clients that wait must learn of it, whatever it was
        mine = isinstance(error, GlmError) and not started
        if not mine:
            if heartbeat.ranks is not None:
                heartbeat.ranks.explain()
            logger.exception("the engine process ends")
        reason = words_of(error) if mine else reason_of(error)
        heartbeat.end(Dead(reason, type(error).__name__ if mine else "EngineDead"), code=1)
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end takes torch a while, and there is nothing left to save


def _build(start: Start, on_progress: Progress, heartbeat: "Heartbeat") -> Any:
    """The core. A test may name another builder."""
    if start.builder is None:
        from glm5.engine.build import build_for

        return build_for(start, on_progress, heartbeat)
    module, _, name = start.builder.partition(":")
    return getattr(importlib.import_module(module), name)(start, on_progress)


def _serve(core: Any, inbox: "_Inbox", outbox: "_Outbox", heartbeat: "Heartbeat") -> None:
    """Turn after turn; without work, asleep on the inbox."""
    while True:
        for message in inbox.take(wait=not core.has_work):
            if isinstance(message, Close):
                core.close()
                return
            core.receive(message)
        with heartbeat.busy():
            for message in core.step():
                outbox.send(message)


class _Inbox:
    def __init__(self, context: zmq.Context[Any], folder: str):
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(f"ipc://{folder}/{INBOX}")
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def start(self) -> Start:
        return msgspec.msgpack.decode(self._socket.recv(), type=Start)

    def take(self, *, wait: bool) -> list[ToEngine]:
        """All messages that are there; with `wait`, at least one."""
        messages: list[ToEngine] = []
        if wait:
            self._socket.poll()
        with suppress(zmq.Again):
            while True:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        return messages

    def close(self) -> None:
        self._socket.close(linger=0)


class _Outbox:
    def __init__(self, context: zmq.Context[Any], folder: str):
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.connect(f"ipc://{folder}/{OUTBOX}")
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Any) -> None:
        self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        self._socket.close(linger=_FLUSH_MS)


class Ranks(Protocol):
    """Processes that this one computes with (ranks.py)."""

    def explain(self) -> None: ...

    def kill(self) -> None: ...

    def held_up_by(self, rank: int) -> str | None: ...


class Heartbeat:
    """Says now and then that the process lives, and ends it when a step takes too long.

    `busy_since`: start of the step that runs, None between steps. `ranks`: they end with this process.
    """

    ranks: Ranks | None = None

    def __init__(self, pipe: int):
        self.num_steps: int = 0
        self.busy_since: float | None = None
        self._pipe, self._parent, self._lock = pipe, os.getppid(), threading.Lock()
        self._ending = threading.Lock()
        self._watchdog = float("inf")

    def start(self, watchdog_timeout: float) -> None:
        self._watchdog = watchdog_timeout
        threading.Thread(target=self._run, daemon=True, name="glm5-heartbeat").start()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A step."""
        self.busy_since = time.monotonic()
        yield
        self.busy_since = None
        self.num_steps += 1

    def end(self, last_words: Dead, code: int) -> NoReturn:
        """Any thread may; the first reason is told, as what follows from it is not why."""
        self._ending.acquire()
        last_words.reason = last_words.reason[:_MAX_REASON]
        if self.ranks is not None:
            self.ranks.kill()
        self.say(last_words)
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)

    def _run(self) -> None:
        interval = threading.Event()
        while not interval.wait(min(BEAT_SECONDS, self._watchdog / 4)):
            if os.getppid() != self._parent:  # its end of stdin may live on in a process that it forked
                os._exit(ORPHANED)
            since = self.busy_since
            busy = 0.0 if since is None else time.monotonic() - since
            if busy > self._watchdog:
                _dump_stacks()
                if self.ranks is not None and (reason := self.ranks.held_up_by(0)) is not None:
                    self.end(Dead(reason), LOST)
                self.end(Dead(_hung(busy, self._watchdog)), HUNG)
            self.say(Beat(self.num_steps, busy))

    def say(self, message: msgspec.Struct) -> None:
        """A line on stdout."""
        with self._lock, suppress(OSError):  # the parent has gone, or has not listened until the pipe was full
            os.write(self._pipe, msgspec.json.encode(message) + b"\n")


def _hung(busy: float, allowed: float) -> str:
    return f"a step hung for {busy:.1f} s; watchdog_timeout allows {allowed:g} s, and stderr shows where it stands"


def _dump_stacks() -> None:
    import faulthandler

    with suppress(OSError, ValueError, RuntimeError):  # stderr may be closed
        faulthandler.dump_traceback(all_threads=True)


def take_stdout() -> int:
    """The pipe that stdout is. What others print from now on goes to stderr."""
    pipe = os.dup(1)  # not inherited: it ends when this process does, whatever it started
    os.set_blocking(pipe, False)
    with suppress(OSError):
        os.dup2(2, 1)
    return pipe


def _end_with_parent(folder: str) -> NoReturn:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(ORPHANED)


if __name__ == "__main__":
    main(*sys.argv[1:])
