"""A server from its first moment to its last: the main thread's part.

    starting    it listens; the model is loaded                  /health 503
    serving     requests are answered                            /health 200
    dead        the engine has died: started again under `supervise`, else the end with an error after a while
    draining    SIGTERM: nothing new is taken, what is under way is answered            /ready 503
    ending      what is still under way is ended and told so

Ctrl-C ends at once what SIGTERM lets finish. A second signal of either kind kills the engine and leaves.
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
from glm5.serve.http.server import CLIENT_SECONDS, GOODBYE_SECONDS, Front, Server, is_everywhere
from glm5.serve.service.service import Engine
from glm5.serve.service.state import ServerState

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
MAX_STARTS = 5  # in a row of engines that do not last, before the server ends
MAX_PAUSE = 30.0
SETTLED_SECONDS = 60.0  # an engine that lived as long has lasted
_FAILED = "; the last start has failed: "

RUNNING, DRAIN, STOP, KILL = range(4)


class Killable(Engine, Protocol):
    """An engine that can be ended without delay."""

    def kill(self) -> None: ...


@dataclass(frozen=True)
class House:
    """What a server is made of.

    `prepare` imports what `start` needs: some modules catch everything at import, a signal's exception too. `start`
    loads and warms an engine, or raises GlmError. `make_app` is called with the first one, `replace` with every later
    one. `say` tells a person what happens. `pause`: seconds by which the wait before a start grows, each time that an
    engine does not last.
    """

    prepare: Callable[[], None]
    start: Callable[[], Killable]
    make_app: Callable[[Any], ASGIApp]
    replace: Callable[[Any], None]
    say: Callable[[str], None]
    state: ServerState
    supervise: bool = False
    client_timeout: float = CLIENT_SECONDS
    shutdown_timeout: float = 300.0
    dead_engine_timeout: float = 10.0
    pause: float = 5.0


def run(house: House, listener: socket.socket) -> None:
    """Serve until a signal comes. Raises EngineDead when the engine has died and is not, or cannot be, started again;
    whatever `start` raises the first time; KeyboardInterrupt for Ctrl-C before there is an engine."""
    house.state.not_serving = "it is being loaded"
    front = Front(house.state)
    server = Server(front, listener, house.client_timeout)
    with _Signals() as signals:
        keeper = _Keeper(house, server, signals)
        server.start()
        try:
            where = " on all addresses" if is_everywhere(listener) else ""
            house.say(f"starting{where}; {server.url}/health says 503 until the model answers")
            house.prepare()
            front.app = house.make_app(keeper.start())
            house.state.not_serving = None
            house.say(f"listening on {server.url}")
            while (reason := keeper.watch()) is not None and keeper.start_again(reason):
                pass
        finally:
            _end(house, server, keeper.engine, signals)


class _Signals:
    """How far SIGTERM and Ctrl-C have come; while the block runs, they do nothing else."""

    def __init__(self) -> None:
        self.level = RUNNING
        self._interrupts = False

    def __enter__(self) -> "_Signals":
        self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within the block a signal raises KeyboardInterrupt, or SystemExit for SIGTERM. So does one of before."""
        self._interrupts = True
        try:
            if self.level != RUNNING:
                self._interrupt()
            yield
        finally:
            self._interrupts = False

    def _hear(self, number: int, _: FrameType | None) -> None:
        first = STOP if number == signal.SIGINT else DRAIN
        self.level = first if self.level == RUNNING else KILL
        if self._interrupts:
            self._interrupt()

    def _interrupt(self) -> None:
        self._interrupts = False  # once: what is interrupted may take a moment to end
        raise SystemExit(0) if self.level == DRAIN else KeyboardInterrupt

    def wait(self, seconds: float) -> bool:
        """Whether a signal has come, after so many seconds at most."""
        until = time.monotonic() + seconds
        while self.level == RUNNING and (left := until - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, left))
        return self.level != RUNNING


class _Keeper:
    """Keeps an engine running."""

    def __init__(self, house: House, server: Server, signals: _Signals):
        self.house, self.server, self.signals = house, server, signals
        self.engine: Killable | None = None
        self._since = 0.0
        self._num_failed = 0  # in a row: starts that did not come to an end, and engines that died soon after theirs

    def start(self) -> Killable:
        """Whatever `house.start` raises; KeyboardInterrupt or SystemExit when a signal comes."""
        with self.signals.interrupting():
            self.engine = self.house.start()
        self._since = time.monotonic()
        return self.engine

    def watch(self) -> str | None:
        """Until the engine has died, of what; or None when a signal has come while it lived."""
        assert self.engine is not None
        while True:
            has_come = self.signals.wait(POLL_SECONDS)
            if (reason := self.engine.stopped_because) is not None:
                return reason
            if has_come:
                return None
            if not self.server.is_running:
                raise RuntimeError("the server's thread has ended; its log says why")

    def start_again(self, reason: str) -> bool:
        """Another engine for one that has died, under `supervise`. False when a signal has come. Raises EngineDead."""
        house, state = self.house, self.house.state
        logger.error("the engine has died: %s", reason)
        state.not_serving = reason
        assert self.engine is not None
        self.engine.close()
        if not house.supervise:
            self.signals.wait(house.dead_engine_timeout)
            raise EngineDead(reason)
        if time.monotonic() - self._since > SETTLED_SECONDS:
            self._num_failed = 0
        while self._num_failed < MAX_STARTS:
            self._num_failed += 1
            state.not_serving = f"{reason}; it is being started again (start {self._num_failed} of {MAX_STARTS})"
            house.say(f"the engine has died ({reason}) and is started again")
            if self.signals.wait(min(MAX_PAUSE, (self._num_failed - 1) * house.pause)):
                return False
            try:
                house.replace(self.start())
            except GlmError as error:
                logger.error("start %d of %d has failed: %s", self._num_failed, MAX_STARTS, error)
                reason = f"{reason.partition(_FAILED)[0]}{_FAILED}{error}"
                continue
            state.not_serving = None
            house.say("the engine answers again")
            return True
        raise EngineDead(f"{reason}; it was started again {MAX_STARTS} times and did not last")


def _end(house: House, server: Server, engine: Killable | None, signals: _Signals) -> None:
    """Answer what is under way if there is time for it, end the rest, and the server with it."""
    state, left = house.state, GOODBYE_SECONDS
    state.is_draining = True
    if engine is not None:
        if signals.level == DRAIN:
            left = _drain(house, engine, signals)
        state.is_closing = engine.stopped_because is None  # what ends from now on is ended by us
        _close(engine, signals)
    server.stop(left, lambda: signals.level == KILL)


def _drain(house: House, engine: Engine, signals: _Signals) -> float:
    """Wait for what is under way; how many seconds are left for clients to read the end of it."""
    state, until = house.state, time.monotonic() + house.shutdown_timeout
    house.say(f"draining {state.num_active} requests; a second signal ends them")
    while signals.level != KILL and engine.stopped_because is None and (left := until - time.monotonic()) > 0:
        if state.wait_until_idle(min(POLL_SECONDS, left)):
            return max(GOODBYE_SECONDS, left)
    return GOODBYE_SECONDS


def _close(engine: Killable, signals: _Signals) -> None:
    """In order, which may take a while; by force once a second signal comes."""
    closing = threading.Thread(target=engine.close, name="glm5-closing", daemon=True)
    closing.start()
    while closing.is_alive() and signals.level != KILL:
        closing.join(POLL_SECONDS)
    if closing.is_alive():
        engine.kill()
        closing.join(GOODBYE_SECONDS)
