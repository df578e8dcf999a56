"""Starts the front ends of a server, kills those that hang, and starts another one when one ends. They run in processes
of their own, accept from the same listening socket, and each is a client of the one engine.

    front end  --- HTTP --->  clients
       |  |______ requests ______>  engine process (glm5.engine.joined)
       |  limits, stored responses, metrics, state
    main process: `FrontEnds` on a thread, `glm5.serve.operations.supervise` on the main thread

A connected pair of sockets joins each front end to this process, and tells either of the other's end.
"""

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from glm5.common.errors import GlmError
from glm5.common.interrupt import signal_name
from glm5.common.log import style
from glm5.common.watching import BEAT_SECONDS, Silence, how_silent
from glm5.config.serve import ServeConfig
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.joined import forget, share
from glm5.engine.transport.link import private_folder
from glm5.serve.coordination.coordinator import Coordinator, Member
from glm5.serve.coordination.messages import Begin, Serve, State, Stop, StopListening, ToMain
from glm5.serve.coordination.peer import Peer
from glm5.serve.http.keys import Key
from glm5.serve.http.limits import Limits
from glm5.serve.http.server import CLOSE_SECONDS, url_of
from glm5.serve.service.state import ServerState

logger = logging.getLogger(__name__)

START_SECONDS = 60.0  # for a front end to import and serve, on a busy machine
SILENT_SECONDS = 30.0  # without a heartbeat; nothing keeps the event loop of a front end from sending them for so long
SETTLED_SECONDS = 60.0  # one that has run this long resets the count of early ends of its place
MAX_EARLY = 5  # ends in a row, of one place; after them the server exits
PAUSE_SECONDS = 1.0  # by which the wait before the next start grows with each early end
_POLL_SECONDS = 0.05
_SECRETS = {"api_key", "admin_api_key"}  # front ends get hashes


class FrontEnds:
    """`num` processes that serve `listener`, under the keys and the state of this process. `start` and `stop` it, and
    `show` it every new engine. Methods are for the main thread."""

    def __init__(self, num: int, settings: ServeConfig, keys: list[Key], state: ServerState, listener: socket.socket):
        self.num, self.settings, self.keys, self.state, self.listener = num, settings, keys, state, listener
        self.url = url_of(listener)
        self.ended_because: str | None = None
        self.processes: dict[int, subprocess.Popen[bytes]] = {}  # by the number of the client
        self.coordinator = Coordinator(Limits.of(settings))
        self._created = int(time.time())
        self._engine: AsyncEngine | None = None
        self._serve: Serve | None = None
        self._serving: dict[Member, Serve] = {}  # what each serves
        self._num_started, self._is_stopping = 0, False
        self._loop, self._ending = asyncio.new_event_loop(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="glm5-front-ends", daemon=True)

    def start(self) -> None:
        """Start the processes, which answer 503 until they are shown an engine."""
        self._thread.start()
        self.state.on_change = lambda: self._do(self._tell_state)

    def show(self, engine: AsyncEngine) -> None:
        """Have all front ends serve an engine, and wait until they do."""
        assert engine.llm.path is not None
        self._remove_folder()
        folder = private_folder()
        share(engine.llm.client.link, folder)
        table = [(name, choice) for name, choice in engine.table]
        self._engine, self._serve = engine, Serve(folder, str(engine.llm.path), self.settings.seed, table)
        self._do(self._tell_serve)

    def stop_listening(self) -> None:
        """Accept no more connections; those that are open stay."""
        self.listener.close()
        self._do(self._tell_stop_listening)

    def stop(self, seconds: float = CLOSE_SECONDS, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """End the processes. Their running responses get `seconds`, or until `is_urgent` is true."""
        self._is_stopping = True
        self.state.on_change = None
        if self._thread.is_alive():
            self._do(partial(self._tell_stop, seconds))
            until = time.monotonic() + seconds + CLOSE_SECONDS
            while self._thread.is_alive() and time.monotonic() < until and not is_urgent():
                self._thread.join(_POLL_SECONDS)
            for process in list(self.processes.values()):
                process.kill()
            self._thread.join(CLOSE_SECONDS)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._serve is not None:
            shutil.rmtree(self._serve.folder, ignore_errors=True)

    def _do(self, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run it on the other thread and wait for its end; without effect once that thread has ended."""
        with self._ending:  # what is begun before the end is cancelled by it
            if self.ended_because is not None:
                return
            future = asyncio.run_coroutine_threadsafe(action(), self._loop)
        while self.ended_because is None and not future.done():
            wait([future], _POLL_SECONDS)
        if future.done() and not future.cancelled():
            future.result()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._keep_all())
        finally:
            self.state.set_active(0)

    async def _keep_all(self) -> None:
        drains, why = asyncio.ensure_future(self._follow_drain()), "it was stopped"
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.num):
                    group.create_task(self._keep_one())
        except* GlmError as given_up:
            why = str(given_up.exceptions[0])
        except* Exception:
            logger.exception("the front ends cannot be kept running")
            why = "its front ends cannot be kept running; the lines above say why"
        finally:
            drains.cancel()
            with self._ending:
                self.ended_because = why

    async def _keep_one(self) -> None:
        """Keep one place filled until the stop. Raises GlmError when its processes end early again and again."""
        num_early = 0
        while not (self._is_stopping or self.state.is_draining):
            began = time.monotonic()
            pid, code = await self._run_one()
            if self._is_stopping or self.state.is_draining:
                break
            why = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
            num_early = 0 if time.monotonic() - began > SETTLED_SECONDS else num_early + 1
            if num_early == MAX_EARLY:
                early = f"{num_early} front ends in a row, each in the place of the one before, ended early"
                raise GlmError(f"{early} (within {SETTLED_SECONDS:g} s); the last was process {pid} ({why})")
            logger.error("the front end of process %d has ended (%s); another one is started", pid, why)
            await asyncio.sleep(max(0, num_early - 1) * PAUSE_SECONDS)

    async def _run_one(self) -> tuple[int, int]:
        """Run one process to its end. Returns its id and exit code."""
        self._num_started += 1
        member = Member(self._num_started, Silence(START_SECONDS, SILENT_SECONDS))
        ours, theirs = socket.socketpair()
        with theirs:
            process = _spawn(self.listener, theirs)
        self.processes[member.client] = process
        tasks = [asyncio.ensure_future(self._watch(member, process))]
        try:
            member.peer = await Peer.on(ours, ToMain, lambda message: self.coordinator.handle(member, message))
            tasks.append(asyncio.ensure_future(self._greet(member)))
            await member.peer.run()
        finally:
            for task in tasks:
                task.cancel()
            self.coordinator.leave(member)
            self._serving.pop(member, None)
            if self._engine is not None:
                forget(self._engine.llm.client.link, member.client)
            process.kill()  # it may have closed the connection and still run
            code = await asyncio.to_thread(process.wait)
            del self.processes[member.client]
        return process.pid, code

    async def _watch(self, member: Member, process: subprocess.Popen[bytes]) -> None:
        """Kill a process that sends no heartbeat. Its connection then ends, as with any other end."""
        silence = member.silence
        while not silence.is_too_long:
            began = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)
            silence.wait(began, BEAT_SECONDS)
        pid, seconds = process.pid, silence.seconds
        logger.error(
            "the front end of process %d sent no heartbeat for %.0f s; %s, and is killed", pid, seconds, how_silent(pid)
        )
        process.kill()

    async def _greet(self, member: Member) -> None:
        """Tell a new front end all that the others know. From then on it hears what changes."""
        settings = self.settings.model_dump(exclude=_SECRETS)
        keys = [key.model_dump() for key in self.keys]
        level = logging.getLevelName(logging.getLogger("glm5").getEffectiveLevel())
        names = dict(self.coordinator.weight_names.known)
        begin = Begin(settings, keys, member.client, self._created, level, style(), names)
        if member.peer is not None:
            member.peer.send(begin)
        await member.ask(self._state(), int, START_SECONDS)  # answered once it has imported what it needs
        self.coordinator.members.add(member)
        await member.ask(self._state(), int, START_SECONDS)  # which may have changed meanwhile
        await self._offer(member)

    async def _offer(self, member: Member) -> None:
        """Have a front end serve the current engine, if there is one."""
        serve = self._serve
        if serve is not None and self._serving.get(member) is not serve:
            await member.ask(serve, None, START_SECONDS)
            self._serving[member] = serve  # if it has failed, its log says why

    async def _tell_serve(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        await asyncio.gather(*[self._offer(member) for member in self.coordinator.members])
        while time.monotonic() < deadline and self.ended_because is None:
            if sum(serve is self._serve for serve in self._serving.values()) == self.num:
                return
            await asyncio.sleep(_POLL_SECONDS)  # some are still being started

    def _state(self) -> State:
        state = self.state
        return State(state.not_serving, state.is_draining, state.is_closing, state.num_restarts)

    async def _tell_state(self) -> None:
        """Returns when all have heard it, so that what follows in the engine finds them prepared."""
        self.state.set_active(sum(await self.coordinator.ask_all(self._state(), int)))

    async def _follow_drain(self) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if self.state.is_draining and not self._is_stopping:
                self.state.set_active(await self.coordinator.refresh())

    async def _tell_stop_listening(self) -> None:
        known = {member.client for member in self.coordinator.members}
        for client, process in self.processes.items():
            if client not in known:  # it is still being started, and holds the socket too
                process.kill()
        await self.coordinator.ask_all(StopListening(), None)

    async def _tell_stop(self, seconds: float) -> None:
        for member in self.coordinator.members:
            if member.peer is not None:
                member.peer.send(Stop(seconds))


def _spawn(listener: socket.socket, connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start a front end in a process group of its own: Ctrl-C in the terminal is for this process.

    It starts in the folder that holds the package, so that nothing in the current folder is imported by mistake.
    """
    home, given = Path(str(files("glm5"))).parent, (listener.fileno(), connection.fileno())
    command = [sys.executable, "-m", "glm5.serve.front_end", *map(str, given), os.getcwd()]
    return subprocess.Popen(command, cwd=home, stdin=subprocess.DEVNULL, pass_fds=given, process_group=0)
