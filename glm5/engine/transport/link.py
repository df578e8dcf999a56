"""The connection of a client to an engine core, in a process of its own or in this one. Both have the same methods.

    send(*messages)        from any thread; without effect once the engine has ended
    receive(timeout)       the messages that arrived, after at most `timeout` seconds; the last one ever is a `Dead`
    kill()                 end the engine now, without waiting for anything

One thread receives. The engine's end is a message too, so no caller waits for an answer that cannot come.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec
import zmq

from glm5.common.errors import reason_of
from glm5.common.watching import Silence, reason_of_silence
from glm5.engine.transport.failure import LOST, reason_of_exit
from glm5.engine.transport.wire import INBOX, OUTBOX, Beat, Close, Dead, EngineInfo, Ready, Start, ToClient, ToEngine

logger = logging.getLogger(__name__)

CLOSED = "it was closed"
FORKED = "this process is a fork of the one that started it; start another engine here"
START_SECONDS = 60.0  # to the first message of a process, on a busy machine
CLOSE_SECONDS = 45.0  # to flush the disk tier, for which the core takes up to 30
# A program that uses NVLink multicast and ends badly can take a machine's GPUs out of service.
_NO_MULTICAST = ("TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "NCCL_NVLS_ENABLE=0", "NVSHMEM_DISABLE_NVLS=1")
_RECONNECT_MS = 5  # until the process has opened its end
# A process has ended: once nothing has arrived for this long, no message of it is still in flight.
_QUIET_MS = 200
_DEAD_MS = 20  # the same after a failure: its requests have failed, and callers should learn so at once
_LEAVE_SECONDS = 5.0  # to notice that a process has ended; immediate unless the machine is overloaded
_MAX_FOLDER = 70  # characters; the path of a socket may have 107


class Core(Protocol):
    """The part of `EngineCore` that a link needs."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def receive(self, message: ToEngine) -> None: ...
    def step(self) -> list[ToClient]: ...
    def close(self) -> None: ...


class Link(Protocol):
    """What a client needs of its engine. `ended`: `Dead` was returned, nothing follows. `is_forked`: this process is a
    fork of the one that started the engine. `client`: which of the engine's clients this is; it starts with 0.
    `is_elsewhere`: the engine is on another machine."""

    client: int
    ended: bool
    is_elsewhere: bool

    @property
    def is_forked(self) -> bool: ...

    def send(self, *messages: ToEngine) -> None: ...
    def receive(self, timeout: float) -> list[ToClient]: ...
    def kill(self) -> None: ...


class InlineLink:
    """A core in this process: it computes in the thread that calls `receive`."""

    client, is_elsewhere = 0, False

    def __init__(self, core: Core):
        self.core, self.ended = core, False
        self._inbox: SimpleQueue[ToEngine] = SimpleQueue()
        self._is_ready = False

    @property
    def is_forked(self) -> bool:
        return False

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            if not self.ended:
                self._inbox.put(message)

    def receive(self, timeout: float) -> list[ToClient]:
        """Run one step of the core if it has work; else wait for a message first."""
        if self.ended:
            return []
        if not self._is_ready:
            self._is_ready = True
            return [Ready(self.core.info)]
        try:
            with suppress(Empty):
                wait = 0.0 if self.core.has_work else timeout
                while True:
                    message = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
                    wait = 0.0
                    if isinstance(message, Close):
                        return [self._end(CLOSED)]
                    self.core.receive(message)
            return self.core.step() if self.core.has_work else []
        except Exception as error:
            # Whatever it was, waiting callers must get it.
            logger.exception("the engine stopped")
            return [self._end(reason_of(error))]

    def kill(self) -> None:
        if not self.ended:
            self._end(CLOSED)

    def _end(self, reason: str) -> Dead:
        self.ended = True
        try:
            self.core.close()
        except Exception:
            logger.exception("the engine could not be closed")
        return Dead(reason)


class ProcessLink:
    """A child process with a core in it. Raises OSError if it cannot be started.

    The child is killed when it sends no heartbeat for `watchdog_timeout` seconds, and when it does not exit within
    CLOSE_SECONDS of a `Close`. It exits by itself when this process does. `launch`: a command in place of Python by
    which it runs on another machine (common/elsewhere.py).
    """

    client = 0

    def __init__(self, start: Start, launch: Sequence[str] = ()):
        self.ended, self._owner, self.is_elsewhere = False, os.getpid(), bool(launch)
        self.watchdog_timeout: float = start.config["watchdog_timeout"]
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToClient)
        # A socket belongs to one thread at a time. Reentrant: a thread that finds the engine ended holds one already.
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        self._folder = private_folder()
        self._context = zmq.Context()
        # Senders connect and receivers bind: messages are then queued while the other process is not there yet or has
        # ended. A bound sender would block.
        self._inbox, self._outbox = self._socket(zmq.PULL), self._socket(zmq.PUSH)
        try:
            self._inbox.bind(f"ipc://{self._folder}/{OUTBOX}")
            self._outbox.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
            self._outbox.connect(f"ipc://{self._folder}/{INBOX}")
            several = start.config.get("tensor_parallel_size", 1) > 1
            self.process = _spawn(self._folder, launch, several=several)
        except BaseException:  # Ctrl-C too
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        assert self.process.stdout is not None
        self._pipe, self._half_line = self.process.stdout, b""
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._pipe.fileno(), zmq.POLLIN)
        self._silence = Silence(max(START_SECONDS, self.watchdog_timeout), self.watchdog_timeout)
        self._is_connected = False
        self._closing_since: float | None = None
        self._death: Dead | None = None
        # For callers that never close: at the latest when the interpreter ends.
        ends = _Ends(self.process, self._context, self._inbox, self._outbox, self._sending, self._receiving)
        self._finalizer = weakref.finalize(self, _release, self._owner, ends, self._folder, CLOSE_SECONDS)
        self._outbox.send(self._encoder.encode(start))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_forked(self) -> bool:
        """Sockets do not work in a fork: their calls would never return."""
        return os.getpid() != self._owner

    def send(self, *messages: ToEngine) -> None:
        if self.is_forked:
            return
        with self._sending:
            if self.ended or not self._finalizer.alive:  # not alive: the interpreter is ending
                return
            self._outbox.send(self._encoder.encode(messages))
            if self._closing_since is None and any(isinstance(message, Close) for message in messages):
                self._closing_since = time.monotonic()

    def receive(self, timeout: float) -> list[ToClient]:
        if self.is_forked:
            is_news, self.ended = not self.ended, True
            return [Dead(FORKED)] if is_news else []
        with self._receiving:
            return [] if self.ended else self._receive(timeout)

    def kill(self) -> None:
        if not self.ended and not self.is_forked:
            self.process.kill()  # first: a receiving thread notices it and releases its lock
            with self._receiving:
                if not self.ended:
                    self._kill(CLOSED)

    def _receive(self, timeout: float) -> list[ToClient]:
        began = time.monotonic()
        events = dict(self._poller.poll(round(timeout * 1000)))
        messages = self._drain()
        if messages and not self._is_connected:  # both ends are, so the names are no longer needed
            self._is_connected = True
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._pipe.fileno() in events and not self._listen():
            return messages + self._end()
        if events:
            self._silence.end()
        else:
            self._silence.wait(began, timeout)
        if self._silence.is_too_long:
            return messages + self._kill(reason_of_silence(self.pid, self._silence.seconds, self.watchdog_timeout))
        if self._closing_since is not None and time.monotonic() - self._closing_since > CLOSE_SECONDS:
            return messages + self._kill(f"{CLOSED}, and killed as it did not end within {CLOSE_SECONDS:g} s")
        return messages

    def _drain(self) -> list[ToClient]:
        return received(self._inbox, self._decoder)

    def _listen(self) -> bool:
        """Read heartbeats; False when the pipe is closed."""
        read = os.read(self._pipe.fileno(), 1 << 16)
        *lines, self._half_line = (self._half_line + read).split(b"\n")
        for line in lines:
            with suppress(msgspec.DecodeError):  # what a library printed before `take_stdout`
                if isinstance(message := msgspec.json.decode(line, type=Beat | Dead), Dead):
                    self._death = message
        return bool(read)

    def _end(self) -> list[ToClient]:
        """The process has ended: its last messages, and the reason."""
        try:
            code = self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # it closed its pipe and still runs
            return self._drain() + self._kill("its process closed its pipe; it has been killed")
        messages: list[ToClient] = []
        while self._inbox.poll(_QUIET_MS if code == 0 else _DEAD_MS):
            messages += self._drain()
        if code == 0 and self._closing_since is not None:
            self._death = Dead(CLOSED)
        elif self._death is None:
            self._death = Dead(reason_of_exit(code))
        elif self._death.kind == "EngineDead" and code != LOST:
            self._death.reason += f" (exit code {code})"
        self._release()
        return [*messages, self._death]

    def _kill(self, reason: str) -> list[ToClient]:
        self.process.kill()
        self.process.wait()
        self._release()
        return [Dead(reason)]

    def _release(self) -> None:
        with self._sending:
            self.ended = True
            self._finalizer()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, 0)  # no limit: the scheduler bounds what is under way
        socket.set(zmq.RCVHWM, 0)
        return socket


def received(inbox: "zmq.Socket[bytes]", decoder: "msgspec.msgpack.Decoder[ToClient]") -> list[ToClient]:
    """All messages that are there, without waiting."""
    messages: list[ToClient] = []
    with suppress(zmq.Again):
        while True:
            messages.append(decoder.decode(inbox.recv(zmq.NOBLOCK)))
    return messages


def private_folder() -> str:
    """Create a folder that no other user can read, with a path short enough for sockets in it."""
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="glm5-", dir=base if len(base) <= _MAX_FOLDER else "/tmp")


def _spawn(folder: str, launch: Sequence[str], *, several: bool) -> subprocess.Popen[bytes]:
    """Start the child in a process group of its own: Ctrl-C in the terminal is for this process.

    It starts in the folder that holds the package, so that nothing in the current folder is imported by mistake.
    `several`: there are several ranks, which inherit the child's environment.
    """
    home = Path(str(files("glm5"))).parent
    python = [*launch, "--sockets", folder, INBOX, OUTBOX] if launch else [sys.executable]
    command = [*python, "-m", "glm5.engine.process", folder, os.getcwd()]
    if several:
        command = ["env", *_NO_MULTICAST, *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=home, stdin=pipe, stdout=pipe, stderr=_stderr(), process_group=0, bufsize=0)


def _stderr() -> int | None:
    """The descriptor of this process's stderr; None if it has none, and the child inherits file 2."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None


@dataclass(frozen=True)
class _Ends:
    """This process's ends of the pipes and sockets to the engine."""

    process: subprocess.Popen[bytes]
    context: "zmq.Context[zmq.Socket[bytes]]"
    inbox: zmq.Socket[bytes]
    outbox: zmq.Socket[bytes]
    sending: threading.RLock
    receiving: threading.RLock

    def send_close(self) -> None:
        with self.sending, suppress(zmq.ZMQError):
            self.outbox.send(msgspec.msgpack.encode([Close()]))

    def close(self) -> None:
        """Call it once the process has ended. At interpreter exit another thread may still be receiving. It notices the
        end at once, and its sockets must stay open until then: closing them under it would crash this process."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if not self.receiving.acquire(timeout=_LEAVE_SECONDS):
            return
        with self.sending:
            self.inbox.close(linger=0)
            self.outbox.close(linger=0)
            self.context.term()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.receiving.release()


def _release(owner: int, ends: _Ends, folder: str, timeout_s: float) -> None:
    """End a process that still runs, and release sockets, pipes and the folder. Does nothing in a fork of the owner."""
    if os.getpid() != owner:
        return
    if ends.process.poll() is None:
        ends.send_close()
        try:
            ends.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            ends.process.kill()
            ends.process.wait()
    ends.close()
    shutil.rmtree(folder, ignore_errors=True)
