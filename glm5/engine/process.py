"""The engine process: `python -m glm5.engine.process FOLDER CWD`, started only by `link.ProcessLink`.

    FOLDER    two ZMQ sockets, MessagePack: one receives requests, the other sends results; after `Listen`, another
              folder has a socket for the results of each further client
    stdin     a pipe that is never written to: when it closes, the parent has ended, and this process exits
    stdout    a pipe for heartbeats and the final message, JSON lines: they need no socket to be flushed
    stderr    the parent's

It exits with code 0 after `Close`, 1 after an exception, and otherwise with a code of `failure`.
"""

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import msgspec
import zmq

from glm5.common import log
from glm5.common.errors import GlmError, reason_of, words_of
from glm5.engine.transport.failure import ORPHANED
from glm5.engine.transport.heartbeat import Heartbeat, take_stdout
from glm5.engine.transport.wire import (
    INBOX,
    OUTBOX,
    Answer,
    Close,
    Dead,
    EngineInfo,
    Growth,
    Join,
    Leave,
    Listen,
    Loading,
    Ready,
    Start,
    ToClient,
    ToEngine,
    Updates,
    client_of,
    sender_of,
)

logger = logging.getLogger(__name__)

_FLUSH_MS = 5000  # for the last answers, after `Close`

Progress = Callable[[str, float], None]


def main(folder: str, cwd: str) -> NoReturn:
    """Serve until `Close`. Exits the process in every case."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or service manager may send them to both processes;
        signal.signal(number, signal.SIG_IGN)  # the parent handles them and closes this one
    heartbeat, folders = Heartbeat(take_stdout()), [folder]
    threading.Thread(target=_end_with_parent, args=(folders,), daemon=True).start()
    with suppress(OSError):  # `_spawn` starts this in another folder, see there
        os.chdir(cwd)
    started = False
    try:
        context = zmq.Context()
        inbox, outbox = _Inbox(context, folder), _Outbox(context, folders)
        start = inbox.start()
        log.configure(start.log_level, start.log_style)
        heartbeat.start(start.config["watchdog_timeout"])
        core = _build(start, lambda phase, share: outbox.send(Loading(phase, share)), heartbeat)
        gc.collect()
        gc.freeze()  # loaded objects stay; no collection needs to visit them again
        outbox.send(Ready(core.info))
        started = True
        _serve(core, inbox, outbox, heartbeat)
        inbox.close()
        outbox.close()
        context.term()
    except BaseException as error:  # whatever it was, waiting clients must get it
        is_user_error = isinstance(error, GlmError) and not started
        if not is_user_error:
            if heartbeat.ranks is not None:
                heartbeat.ranks.wait_for_cause()
            logger.exception("the engine process ends")
        reason = words_of(error) if is_user_error else reason_of(error)
        heartbeat.end(Dead(reason, type(error).__name__ if is_user_error else "EngineDead"), code=1)
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)  # a regular interpreter exit is slow with torch, and there is nothing left to save


def _build(start: Start, on_progress: Progress, heartbeat: "Heartbeat") -> Any:
    """Build the core. A test may name another builder."""
    if start.builder is None:
        from glm5.engine.build import build_for

        return build_for(start, on_progress, heartbeat)
    module, _, name = start.builder.partition(":")
    return getattr(importlib.import_module(module), name)(start, on_progress)


def _serve(core: Any, inbox: "_Inbox", outbox: "_Outbox", heartbeat: "Heartbeat") -> None:
    """Run the core's steps; without work, block on the inbox."""
    while True:
        for message in inbox.take(wait=not core.has_work):
            match message:
                case Close():
                    core.close()
                    return
                case Listen(folder):
                    inbox.bind(folder)
                    outbox.folders.append(folder)
                case _ if outbox.has_left(message):
                    pass
                case Join(client):
                    outbox.join(client, core.info)
                case _:
                    if isinstance(message, Leave):
                        outbox.leave(message.client)
                    core.receive(message)
        with heartbeat.busy():
            for message in core.step():
                outbox.send(message)


class _Inbox:
    def __init__(self, context: zmq.Context[Any], folder: str):
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self.bind(folder)
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])

    def bind(self, folder: str) -> None:
        """Receive through a socket in this folder too."""
        self._socket.bind(f"ipc://{folder}/{INBOX}")

    def start(self) -> Start:
        return msgspec.msgpack.decode(self._socket.recv(), type=Start)

    def take(self, *, wait: bool) -> list[ToEngine]:
        """All messages that are there; with `wait`, at least one."""
        messages: list[ToEngine] = []
        if wait:
            self._socket.poll()
        with suppress(zmq.Again):
            while True:
                messages += self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        return messages

    def close(self) -> None:
        self._socket.close(linger=0)


class _Outbox:
    """A socket to each client. What belongs to no client goes to the first, which started this process."""

    def __init__(self, context: zmq.Context[Any], folders: list[str]):
        self.folders = folders
        self._context, self._encoder = context, msgspec.msgpack.Encoder()
        self._sockets = {0: self._connect(f"{folders[0]}/{OUTBOX}")}
        self._left: set[int] = set()

    def send(self, message: ToClient) -> None:
        if len(self._sockets) == 1:
            self._send(0, message)
        elif isinstance(message, Updates):
            for client, part in _by_client(message).items():
                self._send(client, part)
        else:
            self._send(client_of(message.call_id) if isinstance(message, Answer) else 0, message)

    def join(self, client: int, info: EngineInfo) -> None:
        """Open the socket to a client, and tell it that the engine is ready."""
        if client not in self._sockets:
            self._sockets[client] = self._connect(f"{self.folders[-1]}/{OUTBOX}-{client}")
            self._send(client, Ready(info))

    def leave(self, client: int) -> None:
        self._left.add(client)
        if (socket := self._sockets.pop(client, None)) is not None:
            socket.close(linger=0)

    def has_left(self, message: ToEngine) -> bool:
        """Whether the sender of a message has left: its messages may arrive after `Leave`, which another one sends."""
        return bool(self._left) and sender_of(message) in self._left

    def close(self) -> None:
        for client, socket in self._sockets.items():
            socket.close(linger=0 if client else _FLUSH_MS)  # others end when the first says so, and read no more

    def _send(self, client: int, message: ToClient) -> None:
        if (socket := self._sockets.get(client)) is not None:
            socket.send(self._encoder.encode(message))

    def _connect(self, path: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.SNDHWM, 0)
        socket.connect(f"ipc://{path}")
        return socket


def _by_client(message: Updates) -> dict[int, Updates]:
    """What a step brought, client by client."""
    parts: dict[int, Updates] = {}
    if (growth := message.growth) is not None:
        stop = 0
        for i, seq_id in enumerate(growth.seq_ids):
            start, stop = stop, stop + (growth.counts[i] if growth.counts else 1)
            part = parts.setdefault(client_of(seq_id), Updates([], Growth(growth.version))).growth
            assert part is not None
            part.seq_ids.append(seq_id)
            part.counts += growth.counts[i : i + 1]
            part.token_ids += growth.token_ids[start:stop]
            part.logprobs += growth.logprobs[start:stop]
            part.sampling_mask += growth.sampling_mask[start:stop]
    for update in message.updates:
        parts.setdefault(client_of(update.seq_id), Updates([])).updates.append(update)
    return parts


def _end_with_parent(folders: list[str]) -> NoReturn:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(ORPHANED)


if __name__ == "__main__":
    main(*sys.argv[1:])
