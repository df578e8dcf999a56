"""Listening, and ending cleanly: running answers are aborted and told so, then the server returns."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from glm5.serve.service import Engine

# For clients that do not read the end of their answer.
_SECONDS_TO_SAY_GOODBYE = 3
# Clients give their idle connections up after 5 s (httpx) to a minute. Who does it first cannot meet a request on its
# way; a server that does resets that request.
_IDLE_SECONDS = 90


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address (port 0: a free one) that does not listen yet. Raises OSError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine finds the socket's server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, engine: Engine, listener: socket.socket, on_listening: Callable[[], None]) -> None:
    """Serve on the main thread until SIGINT or SIGTERM. Closes engine and socket."""
    asyncio.run(_Server(app, engine, on_listening).serve([listener]))


@contextmanager
def serving(app: FastAPI, engine: Engine, listener: socket.socket) -> Iterator[str]:
    """Serve on a thread of its own while the block runs; gives the URL. Closes engine and socket at the end."""
    ready = threading.Event()
    server = _Server(app, engine, ready.set)

    def run() -> None:
        try:
            asyncio.run(server.serve([listener]))
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="glm5-server")
    url = url_of(listener)
    thread.start()
    try:
        ready.wait()
        if not server.started:
            raise RuntimeError("the server did not start; its log says why")
        yield url
    finally:
        server.should_exit = True
        thread.join()


class _Server(uvicorn.Server):
    """Logs to the handlers that the command line set up. Signals end it, and are not raised again at its end."""

    def __init__(self, app: FastAPI, engine: Engine, on_listening: Callable[[], None]):
        # h11 and asyncio are always there: the same server on every machine.
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_SECONDS_TO_SAY_GOODBYE,
                timeout_keep_alive=_IDLE_SECONDS,
            )
        )
        self.engine, self.on_listening = engine, on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self.engine.close)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
