"""A process on another machine, which a process here stands in for, as that of `ssh` does.

    python -m glm5.common.elsewhere FILE [--python PYTHON] [--sockets FOLDER OPENED CONNECTED] ARGUMENTS

    stands in          standard input, output and error, and the exit code, are those of `python ARGUMENTS` over there
    --sockets          FOLDER/OPENED is a socket that the process opens, FOLDER/CONNECTED one that it connects to: they
                       are carried over, and FOLDER among the arguments becomes a folder over there
    FILE               JSON, for this user alone: {"host", "port", "key"} of a `Host`

One TCP connection carries it all. Both sides prove that they have the key (multiprocessing.connection); nothing is
encrypted. Where the connection ends, so does the process over there; where that ends, so does this one.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from itertools import count
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

LOST = 255
"""Exit code where the connection ended."""
MEET_SECONDS = 60.0
_CHUNK = 1 << 16
_START, _STDIN, _STDIN_END, _STDOUT, _STDERR, _EXIT, _OPEN, _DATA, _SHUT = b"SIiOEXCDc"
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class _Wire:
    """Messages of a kind, the number of a carried connection, and bytes."""

    def __init__(self, link: "Connection[Any, Any]") -> None:
        self._link, self._sending = link, threading.Lock()
        with socket.socket(fileno=os.dup(link.fileno())) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                end.setsockopt(socket.IPPROTO_TCP, name, value)

    def send(self, kind: int, data: bytes = b"", number: int = 0) -> None:
        with self._sending, suppress(OSError):  # the reader notices the end
            self._link.send_bytes(bytes([kind]) + number.to_bytes(4, "big") + data)

    def receive(self) -> tuple[int, int, bytes]:
        """Raises OSError or EOFError where the other side has ended."""
        message = self._link.recv_bytes()
        return message[0], int.from_bytes(message[1:5], "big"), message[5:]


class _Carried:
    """Connections of Unix sockets in `folder`: this side accepts those of `listens`, and opens those of `connects`."""

    def __init__(self, wire: _Wire, folder: Path, listens: str, connects: str, first: int) -> None:
        self._wire, self._target, self._ends = wire, str(folder / connects), dict[int, socket.socket]()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(folder / listens))
        self._server.listen()
        _thread(lambda: self._accept(first))

    def _accept(self, first: int) -> None:
        with suppress(OSError):
            for number in count(first, 2):  # the other side has the others
                end, _ = self._server.accept()
                self._wire.send(_OPEN, number=number)
                self._add(number, end)

    def close(self) -> None:
        for end in (self._server, *self._ends.values()):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _add(self, number: int, end: socket.socket) -> None:
        self._ends[number] = end
        _thread(lambda: _pump(lambda: end.recv(_CHUNK), self._wire, _DATA, _SHUT, number))

    def handle(self, kind: int, number: int, data: bytes) -> None:
        if kind == _OPEN:
            self._add(number, self._connected())
        elif (end := self._ends.get(number)) is not None:
            with suppress(OSError):
                end.sendall(data) if kind == _DATA else end.shutdown(socket.SHUT_WR)

    def _connected(self) -> socket.socket:
        deadline, tick = time.monotonic() + MEET_SECONDS, threading.Event()
        while True:  # until the process has opened its socket
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                end.connect(self._target)
                return end
            except OSError:
                end.close()
                if time.monotonic() > deadline:
                    raise
            tick.wait(0.01)


class Host:
    """The other machine's side, for one process. `address` is where its stand-in finds it."""

    def __init__(self, address: str, key: bytes) -> None:
        self._listener = Listener((address, 0), authkey=key)
        self.address: tuple[str, int] = self._listener.address  # pyright: ignore[reportAttributeAccessIssue]

    def serve(self) -> None:
        """Wait for the stand-in, and run the process to its end."""
        listener: Any = self._listener
        listener._listener._socket.settimeout(MEET_SECONDS)
        link = None
        while link is None:
            with suppress(AuthenticationError):
                link = self._listener.accept()
        self._listener.close()
        wire, folder = _Wire(link), Path(tempfile.mkdtemp(prefix="glm5-"))
        try:
            kind, _, data = wire.receive()
            assert kind == _START, f"{kind=}"
            _run(wire, folder, **json.loads(data))
        except (OSError, EOFError):
            return
        finally:
            link.close()
            shutil.rmtree(folder, ignore_errors=True)


def _run(wire: _Wire, folder: Path, *, python: str | None, arguments: list[str], sockets: list[str] | None) -> None:
    carried = None
    if sockets is not None:
        carried = _Carried(wire, folder, sockets[2], sockets[1], 1)
        arguments = [str(folder) if one == sockets[0] else one for one in arguments]
    pipe, home = subprocess.PIPE, Path(str(files("glm5"))).parent
    command = [python or sys.executable, *arguments]
    process = subprocess.Popen(command, cwd=home, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0, bufsize=0)
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None
    outputs = [(stdout, _STDOUT), (stderr, _STDERR)]
    pumps = [_thread(lambda f=f, kind=kind: _pump(lambda: f.read(_CHUNK), wire, kind)) for f, kind in outputs]

    def end() -> None:
        code = process.wait()
        for one in pumps:
            one.join(1.0)  # a process that outlives it may hold the pipes
        wire.send(_EXIT, str(code).encode())

    def hand_over() -> None:
        while (message := received.get()) is not None:
            kind, number, data = message
            if kind in (_STDIN, _STDIN_END):
                with suppress(OSError, ValueError):
                    stdin.write(data) if kind == _STDIN else stdin.close()
            elif carried is not None:
                carried.handle(kind, number, data)

    received = SimpleQueue[tuple[int, int, bytes] | None]()
    _thread(end)
    _thread(hand_over)  # it may block for as long as the process is stopped
    try:
        while True:
            received.put(wire.receive())
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        received.put(None)
        for one in pumps:
            one.join(1.0)
        for file in (stdin, stdout, stderr):
            with suppress(OSError):
                file.close()
        if carried is not None:
            carried.close()


def _pump(read: Callable[[], bytes | None], wire: _Wire, kind: int, at_end: int | None = None, number: int = 0) -> None:
    with suppress(OSError, ValueError):
        while data := read():
            wire.send(kind, data, number)
    if at_end is not None:
        wire.send(at_end, number=number)


def _thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def main() -> NoReturn:
    file, *arguments = sys.argv[1:]
    python, sockets = None, None
    if arguments[0] == "--python":
        _, python, *arguments = arguments
    if arguments[0] == "--sockets":
        _, *sockets = arguments[:4]
        arguments = arguments[4:]
    found = json.loads(Path(file).read_text(encoding="utf-8"))
    try:
        wire = _Wire(Client((found["host"], found["port"]), authkey=bytes.fromhex(found["key"])))
        carried = None
        if sockets is not None:
            carried = _Carried(wire, Path(sockets[0]), sockets[1], sockets[2], 0)
        wire.send(_START, json.dumps({"python": python, "arguments": arguments, "sockets": sockets}).encode())
        _thread(lambda: _pump(lambda: os.read(0, _CHUNK), wire, _STDIN, _STDIN_END))
        while True:
            kind, number, data = wire.receive()
            if kind in (_STDOUT, _STDERR):
                os.write(1 if kind == _STDOUT else 2, data)
            elif kind == _EXIT:
                _exit(int(data))
            elif carried is not None:
                carried.handle(kind, number, data)
    except (OSError, EOFError) as error:
        os.write(2, f"glm5: the machine {found['host']} was lost ({type(error).__name__})\n".encode())
        os._exit(LOST)


def _exit(code: int) -> NoReturn:
    """End as the other process did: with its exit code, or by its signal."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
