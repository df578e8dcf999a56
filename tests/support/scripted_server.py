"""A server of HTTP whose answers follow a script: what is sent, and how long after what was sent before.

It speaks over real sockets (`serve_on`) and without any (`in_memory`), there in an event loop's virtual time too.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Request:
    """What a client sent, and when it was all there."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def json(self):
        return json.loads(self.body)


@dataclass
class Script:
    """An answer. Steps: (seconds after the step before, bytes of the body); each is one HTTP chunk.

    `close`: the connection ends after the last step, instead of the body. `raw`: steps are sent as they are.
    """

    steps: list[tuple[float, bytes]]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    close: bool = False
    raw: bool = False


Handler = Callable[[Request], Script]


def event(content) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def plain(content, status: int = 200, **headers) -> Script:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Script([(0.0, body)], status, headers)


def completion(
    ttft: float, gaps: list[float], *, prompt_tokens: int = 7, usage: int | None = None, texts: list[str] | None = None
) -> Script:
    """A streamed completion: a chunk after `ttft`, one after each gap, then usage and the end without delay."""
    pieces = texts or [f"t{k} " for k in range(len(gaps) + 1)]
    chunks = [{"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None} for text in pieces]
    chunks[-1]["choices"][0]["finish_reason"] = "length"
    steps = [(wait, event(chunk)) for wait, chunk in zip([ttft, *gaps], chunks, strict=True)]
    count = {"prompt_tokens": prompt_tokens, "completion_tokens": usage or len(pieces)}
    return Script([*steps, (0.0, event({"choices": [], "usage": count})), (0.0, event(b"[DONE]"))])


class Connection(asyncio.Protocol):
    """The server's end of a connection; one request at a time."""

    def __init__(self, handler: Handler, loop: asyncio.AbstractEventLoop) -> None:
        self.handler, self.loop = handler, loop
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        self.transport = transport

    def connection_lost(self, exc) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self.buffer = rest[length:]
        method, path, _ = first.split()
        self.play(self.handler(Request(method, path, headers, rest[:length], self.loop.time())))

    def play(self, script: Script) -> None:
        # Each step's time is reckoned from the request, so that lateness of one does not move the next.
        headers = {"Transfer-Encoding": "chunked", "Content-Type": "text/event-stream"} | script.headers
        head = f"HTTP/1.1 {script.status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        steps = [(wait, data if script.raw else b"%x\r\n%s\r\n" % (len(data), data)) for wait, data in script.steps]
        if not script.raw:
            self.transport.write(head.encode() + b"\r\n")
            steps += [] if script.close else [(0.0, b"0\r\n\r\n")]
        self.go_on(steps, self.loop.time(), close=script.close)

    def go_on(self, steps: list[tuple[float, bytes]], at: float, *, close: bool) -> None:
        """Take the first step when its time has come, and the rest after it; `at` is when the step before was due."""
        while steps and steps[0][0] == 0:
            self.transport.write(steps.pop(0)[1])
        if steps:
            at += steps[0][0]
            later = [(0.0, steps[0][1]), *steps[1:]]
            self.timer = self.loop.call_at(at, lambda: self.go_on(later, at, close=close))
        elif close:
            self.transport.close()


class _Pipe(asyncio.Transport):
    """One end of a connection without sockets."""

    def __init__(self, loop: asyncio.AbstractEventLoop, own: asyncio.Protocol) -> None:
        super().__init__()
        self.loop, self.own, self.closing = loop, own, False
        self.peer: _Pipe

    def write(self, data: bytes) -> None:
        if not self.closing:
            self.loop.call_soon(self.peer.take, bytes(data))

    def take(self, data: bytes) -> None:
        if not self.closing:
            self.own.data_received(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        for end in (self, self.peer):
            # After what was written before: a close is a message like any other.
            self.loop.call_soon(end.lost)

    def abort(self) -> None:
        self.close()
        self.closing = True
        self.own, lost = asyncio.Protocol(), self.own
        self.loop.call_soon(lost.connection_lost, None)

    def lost(self) -> None:
        if not self.closing:
            self.closing = True
            self.own.connection_lost(None)


def in_memory(handler: Handler):
    """What `glm5.bench.serve.session.measure` takes for `connect`: every connection leads to `handler`."""

    async def connect(_address=None):
        loop = asyncio.get_running_loop()

        async def open_connection(factory):
            client = factory()
            near, far = _Pipe(loop, client), _Pipe(loop, Connection(handler, loop))
            near.peer, far.peer = far, near
            far.own.connection_made(far)
            client.connection_made(near)
            return client

        return open_connection

    return connect


@contextmanager
def serving(handler: Handler):
    """The URL of a server on a free port of this machine, in a thread of its own."""
    loop = asyncio.new_event_loop()

    async def listen() -> asyncio.Server:
        return await loop.create_server(lambda: Connection(handler, loop), "127.0.0.1", 0)

    server = loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
