"""The life cycle of a server: start, restart of a dead engine, drain and shutdown. Runs on the main thread.

    starting    the socket listens while the model is loaded                            /health 503
    serving     requests are answered                                                   /health 200
    dead        the engine has died: `supervise` restarts it; else the server exits with an error after a while
    draining    after SIGTERM: new requests are refused, running requests finish        /ready 503
    closing     running requests are aborted and get an error

Ctrl-C skips draining. A second signal of either kind kills the engine and exits.
"""

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from starlette.types import ASGIApp

from glm5.common.errors import EngineDead, GlmError
from glm5.serve.http.server import CLIENT_SECONDS, CLOSE_SECONDS, AppWhenReady, Server, is_everywhere
from glm5.serve.service.service import Engine
from glm5.serve.service.state import ServerState

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
MAX_STARTS = 5  # consecutive restarts of engines that fail early; after them the server exits
MAX_PAUSE = 30.0
STABLE_SECONDS = 60.0  # an engine that has run this long resets the count of failed starts
_FAILED = "; the last start has failed: "

RUNNING, DRAIN, STOP, KILL = range(4)


class Killable(Engine, Protocol):
    """An engine whose processes can be killed without waiting for them."""

    def kill(self) -> None: ...


class Front(Protocol):
    """What answers HTTP: a `Server` on a thread of this process, or several processes."""

    @property
    def url(self) -> str: ...
    @property
    def ended_because(self) -> str | None: ...
    def start(self) -> None: ...
    def stop_listening(self) -> None: ...
    def stop(self, seconds: float = ..., is_urgent: Callable[[], bool] = ...) -> None: ...


@dataclass(frozen=True)
class ServerSetup:
    """The callbacks and options of one server.

    `import_modules` imports what `start` needs. It is separate because some modules catch every exception at import,
    also that of a signal. `start` loads an engine and warms it up, or raises GlmError. `make_app` gets the first
    engine, `replace` every later one. `report` prints a status line. `pause`: seconds by which the wait before a
    restart grows with each engine that fails early. `front`: the processes that serve, which `replace` gives every
    engine, the first too; None: this process serves the application of `make_app`.
    """

    import_modules: Callable[[], None]
    start: Callable[[], Killable]
    make_app: Callable[[Any], ASGIApp]
    replace: Callable[[Any], None]
    report: Callable[[str], None]
    state: ServerState
    supervise: bool = False
    client_timeout: float = CLIENT_SECONDS
    shutdown_timeout: float = 300.0
    dead_engine_timeout: float = 10.0
    pause: float = 5.0
    front: Front | None = None


def run(setup: ServerSetup, listener: socket.socket) -> None:
    """Serve until a signal arrives. Raises EngineDead when the engine has died and is not restarted, GlmError when what
    answers HTTP has ended, whatever the first `start` raises, and KeyboardInterrupt for Ctrl-C before the first engine
    runs."""
    setup.state.change(not_serving="it is being loaded")
    app = AppWhenReady(setup.state)
    server = setup.front or Server(app, listener, setup.client_timeout)
    with _Signals() as signals:
        supervisor = _EngineSupervisor(setup, server, signals)
        server.start()
        try:
            where = " on all addresses" if is_everywhere(listener) else ""
            setup.report(f"starting{where}; {server.url}/health returns 503 until the model is loaded")
            setup.import_modules()
            engine = supervisor.start()
            if setup.front is None:
                app.app = setup.make_app(engine)
            else:
                setup.replace(engine)
            setup.state.change(not_serving=None)
            setup.report(f"listening on {server.url}")
            while (reason := supervisor.watch()) is not None and supervisor.restart(reason):
                pass
        finally:
            _end(setup, server, supervisor.engine, signals)


class _Signals:
    """Turns SIGTERM and Ctrl-C into a shutdown `level` while the block runs, instead of exceptions."""

    def __init__(self) -> None:
        self.level = RUNNING
        self._raises = False

    def __enter__(self) -> "_Signals":
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """In the block signals raise KeyboardInterrupt, or SystemExit for SIGTERM; an earlier one does on entry."""
        self._raises = True
        try:
            if self.level != RUNNING:
                self._raise()
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        first = STOP if number == signal.SIGINT else DRAIN
        self.level = first if self.level == RUNNING else KILL
        if self._raises:
            self._raise()

    def _raise(self) -> None:
        self._raises = False  # raise only once: the interrupted code may take a moment to clean up
        raise SystemExit(0) if self.level == DRAIN else KeyboardInterrupt

    def wait(self, seconds: float) -> bool:
        """Wait up to so many seconds for a signal; returns whether one has arrived."""
        until = time.monotonic() + seconds
        while self.level == RUNNING and (left := until - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, left))
        return self.level != RUNNING


class _EngineSupervisor:
    """Starts the engine, detects its death and restarts it."""

    def __init__(self, setup: ServerSetup, server: Front, signals: _Signals):
        self.setup, self.server, self.signals = setup, server, signals
        self.engine: Killable | None = None
        self._since = 0.0
        self._num_failed = 0  # consecutive starts that failed or whose engine died early

    def start(self) -> Killable:
        """Start an engine. Raises what `setup.start` raises, and KeyboardInterrupt or SystemExit for a signal."""
        with self.signals.interrupting():
            self.engine = self.setup.start()
        self._since = time.monotonic()
        return self.engine

    def watch(self) -> str | None:
        """Wait until the engine has died and return why; return None when a signal arrives first."""
        assert self.engine is not None
        while True:
            is_signalled = self.signals.wait(POLL_SECONDS)
            if (reason := self.engine.stopped_because) is not None:
                return reason
            if is_signalled:
                return None
            if (reason := self.server.ended_because) is not None:
                raise GlmError(f"the server has ended: {reason}")

    def restart(self, reason: str) -> bool:
        """Restart a dead engine under `supervise`. False when a signal has arrived. Raises EngineDead."""
        setup, state = self.setup, self.setup.state
        logger.error("the engine has died: %s", reason)
        state.change(not_serving=reason)
        assert self.engine is not None
        self.engine.close()
        if not setup.supervise:
            self.signals.wait(setup.dead_engine_timeout)
            raise EngineDead(reason)
        if time.monotonic() - self._since > STABLE_SECONDS:
            self._num_failed = 0
        while self._num_failed < MAX_STARTS:
            self._num_failed += 1
            again = f"the engine is being restarted (start {self._num_failed} of {MAX_STARTS})"
            state.change(not_serving=f"{reason}; {again}")
            setup.report(f"the engine has died ({reason}) and is restarted")
            if self.signals.wait(min(MAX_PAUSE, (self._num_failed - 1) * setup.pause)):
                return False
            try:
                setup.replace(self.start())
            except GlmError as error:
                logger.error("restart %d of %d has failed: %s", self._num_failed, MAX_STARTS, error)
                reason = f"{reason.partition(_FAILED)[0]}{_FAILED}{error}"
                continue
            state.change(not_serving=None, num_restarts=state.num_restarts + 1)
            setup.report("the engine answers again")
            return True
        raise EngineDead(f"{reason}; it was restarted {MAX_STARTS} times and failed early each time")


def _end(setup: ServerSetup, server: Front, engine: Killable | None, signals: _Signals) -> None:
    """Shut down: drain if SIGTERM requested it, close the engine, then stop the server."""
    state, left = setup.state, CLOSE_SECONDS
    state.change(is_draining=True)
    if engine is not None and signals.level == DRAIN:
        left = _drain(setup, engine, signals)
    server.stop_listening()  # before the engine is closed: until then who has connected is answered
    if engine is not None:
        # Requests that end from now on were ended by this shutdown.
        state.change(is_closing=engine.stopped_because is None)
        _close(engine, signals)
    server.stop(left, lambda: signals.level == KILL)


def _drain(setup: ServerSetup, engine: Engine, signals: _Signals) -> float:
    """Wait for running requests; returns how many seconds clients still have to read their responses."""
    state, until = setup.state, time.monotonic() + setup.shutdown_timeout
    setup.report(f"draining {state.num_active} requests; a second signal ends them")
    while signals.level != KILL and engine.stopped_because is None and (left := until - time.monotonic()) > 0:
        if state.wait_until_idle(min(POLL_SECONDS, left)):
            return max(CLOSE_SECONDS, left)
    return CLOSE_SECONDS


def _close(engine: Killable, signals: _Signals) -> None:
    """Close the engine in an orderly way, which may take a while; kill it once a second signal arrives."""
    closing = threading.Thread(target=engine.close, name="glm5-closing", daemon=True)
    closing.start()
    while closing.is_alive() and signals.level != KILL:
        closing.join(POLL_SECONDS)
    if closing.is_alive():
        engine.kill()
        closing.join(CLOSE_SECONDS)
