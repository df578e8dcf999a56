"""Worker processes that run episodes, for an asyncio program.

    async with EnvironmentWorkers(["guess"], num_workers=2) as workers:
        task = await workers.task("guess", seed=0, level=0)
        episode = await workers.reset(task)
        async with episode:
            turn = await episode.step(Reply("8"))

A worker runs many episodes, several at a time. Every answer has a time limit: a worker that exceeds it, or dies, is
killed and replaced, and its episodes fail with EpisodeFailed("environment"). What an environment raises is
EpisodeFailed as well. What is asked of quick environments in one turn of the event loop travels together.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any, Self

from glm5.common.errors import ConfigError
from glm5.common.interrupt import signal_name
from glm5.rl.environments.protocol import EpisodeFailed, Message, Reply, Task, Turn
from glm5.rl.environments.verifiers import python_of
from glm5.rl.environments.wire import MAX_FRAME, TooLarge, as_json, as_task, as_turn, batch_frame, frame
from glm5.rl.environments.worker import NUM_THREADS
from glm5.rl.sandbox.backends import Backend

MODULE = "glm5.rl.environments.worker"
START_SECONDS = 120.0  # a library of environments may take half a minute to import
STEP_SECONDS = 120.0
CLOSE_SECONDS = 10.0
MAX_BATCH, MAX_BATCHED = 256, 8192  # requests that travel together, and characters of each: together below MAX_FRAME

Kind = tuple[str, int]
"""Of a task: its environment and level."""


class EnvironmentWorkers:
    """Processes that run the episodes of these environments; use as an async context manager.

    `num_workers`: processes of each Python. `step_seconds`: time for one answer, after which its worker is killed.
    `sandbox`: what boxes are made of; without, episodes that need one fail. `launcher`: makes a command in place of
    Python by which a worker runs on another machine (common/elsewhere.py). Entering raises ConfigError where an
    environment cannot be made.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        num_workers: int = 1,
        step_seconds: float = STEP_SECONDS,
        sandbox: Backend | None = None,
        launcher: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._seconds = step_seconds
        common = {"folder": os.getcwd(), "sandbox": asdict(sandbox) if sandbox else None}
        self._slots = list[_Slot]()
        for python in dict.fromkeys(map(python_of, names)):
            path = [each or os.getcwd() for each in sys.path] if python == sys.executable else [os.getcwd()]
            own = [name for name in names if python_of(name) == python]
            self._slots += [_Slot(python, common | {"names": own, "path": path}, launcher) for _ in range(num_workers)]
        self._numbers = count()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(slot.worker() for slot in self._slots))
        except EpisodeFailed as failure:
            await self.__aexit__()
            raise ConfigError(failure.reason) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(slot.close() for slot in self._slots))

    async def task(self, name: str, seed: int, level: int) -> Task:
        """The task of that seed and level."""
        slot = self._freest(name)
        slot.num_episodes += 1  # while it is made, so that others are made elsewhere
        try:
            worker = await slot.worker()
            return as_task(await worker.ask("task", self._seconds, (name, level), name=name, seed=seed, level=level))
        finally:
            slot.num_episodes -= 1

    async def reset(self, task: Task) -> "RemoteEpisode":
        """Begin an episode. Raises EpisodeFailed, as all of these do."""
        (episode,) = await self.reset_all(task, 1)
        if isinstance(episode, EpisodeFailed):
            raise episode
        return episode

    async def reset_all(self, task: Task, count: int) -> "list[RemoteEpisode | EpisodeFailed]":
        """Begin episodes of a task in one worker, which then knows what is the same in them; a failure stands in the
        place of one that could not begin."""
        slot = self._freest(task.environment)
        try:
            is_quick = _kind_of(task) in (await slot.worker()).beginning
        except EpisodeFailed as failure:
            return [failure] * count
        parts = [count] if is_quick else [1] * count
        return [one for part in await asyncio.gather(*(self._reset(slot, task, n) for n in parts)) for one in part]

    async def _reset(self, slot: "_Slot", task: Task, count: int) -> "list[RemoteEpisode | EpisodeFailed]":
        kind = _kind_of(task)
        numbers = [next(self._numbers) for _ in range(count)]
        slot.num_episodes += count
        num_begun = 0
        try:
            worker = await slot.worker()
            begun = await worker.ask("reset", self._seconds, kind, task=as_json(task), episodes=numbers)
            num_begun = sum("value" in one for one in begun)
        except EpisodeFailed as failure:
            return [failure] * count
        finally:
            slot.num_episodes -= count - num_begun
        return [
            RemoteEpisode(slot, worker, number, kind, tuple(one["value"]), self._seconds)
            if "value" in one
            else EpisodeFailed(*one["failed"])
            for number, one in zip(numbers, begun, strict=True)
        ]

    async def score_group(self, task: Task, rewards: Sequence[float]) -> list[float]:
        """Rewards of a group's rollouts that depend on each other."""
        worker = await self._freest(task.environment).worker()
        if task.environment not in worker.scoring:
            return list(rewards)
        return await worker.ask("score_group", self._seconds, _kind_of(task), task=as_json(task), rewards=list(rewards))

    def is_quick(self, name: str, level: int) -> bool:
        """Whether every answer about such a task is computed at once; False as long as no worker has told."""
        return any(slot.is_quick(name, level) for slot in self._slots)

    def _freest(self, name: str) -> "_Slot":
        """Of those that run an environment."""
        own = (slot for slot in self._slots if slot.python == python_of(name))
        return min(own, key=lambda slot: slot.num_episodes)


@dataclass(eq=False)
class RemoteEpisode:
    """An episode in a worker, which closes it at its end. Close it, or use it as an async context manager, where it may
    end before. `step_seconds`: time for one answer."""

    _slot: "_Slot"
    _worker: "_Worker"
    _number: int
    _kind: Kind
    messages: tuple[Message, ...]
    step_seconds: float
    is_closed: bool = False

    async def step(self, reply: Reply) -> Turn:
        """What the environment answers. Raises EpisodeFailed."""
        value = await self._ask("step", reply=as_json(reply))
        if value["is_done"]:
            self._release()
        try:
            return as_turn(value)
        except (ValueError, TypeError) as error:
            raise EpisodeFailed("environment", str(error)) from None

    async def close(self) -> None:
        """Give back what the episode holds, before its end. It may be called twice, and after a failure."""
        if not self.is_closed:
            self._release()
            with suppress(EpisodeFailed):
                await self._ask("close")

    def _release(self) -> None:
        self.is_closed = True
        self._slot.num_episodes -= 1

    async def _ask(self, op: str, **fields: Any) -> Any:
        return await self._worker.ask(op, self.step_seconds, self._kind, episode=self._number, **fields)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _kind_of(task: Task) -> Kind:
    return task.environment, task.level


class _Slot:
    """A worker, and the next one after it has died."""

    def __init__(self, python: str, settings: Mapping[str, Any], launcher: Callable[[], Sequence[str]]) -> None:
        self.python, self.num_episodes, self._launcher = python, 0, launcher
        self._settings, self._starting = settings, asyncio.Lock()
        self._worker: _Worker | None = None

    async def worker(self) -> "_Worker":
        """The running worker. Raises EpisodeFailed where none can be started."""
        async with self._starting:
            if self._worker is None or self._worker.is_gone:
                launch = await asyncio.to_thread(self._launcher)
                python = [*launch, "--python", self.python] if launch else [self.python]
                self._worker = await _Worker.start(python, self._settings)
            return self._worker

    def is_quick(self, name: str, level: int) -> bool:
        return self._worker is not None and (name, level) in self._worker.quick

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()


class _Worker:
    """A process, and the requests that it has not answered. `quick`: tasks whose requests may travel together;
    `beginning`: those of which `reset` may. `scoring`: names of environments with rewards that depend on a whole
    group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.quick, self.beginning, self.scoring = frozenset[Kind](), frozenset[Kind](), frozenset[str]()
        self._batch = list[tuple[str, asyncio.Future[Any]]]()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers, self._turns = count(), asyncio.Semaphore(NUM_THREADS)
        self._gone = ""
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, python: Sequence[str], settings: Mapping[str, Any]) -> "_Worker":
        home = Path(str(files("glm5"))).parent
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *python, "-m", MODULE, cwd=home, stdin=pipe, stdout=pipe, process_group=0, limit=MAX_FRAME
        )
        worker = cls(process)
        try:
            found = await worker.ask("start", START_SECONDS, None, **settings)
            worker.quick, worker.beginning = (frozenset(map(tuple, found[one])) for one in ("quick", "beginning"))
            worker.scoring = frozenset(found["scoring"])
        except BaseException as error:
            await worker.end("it could not start")
            if isinstance(error, EpisodeFailed) and (why := await _import_error(python, home)):
                raise EpisodeFailed(error.kind, why) from None
            raise
        return worker

    @property
    def is_gone(self) -> bool:
        return bool(self._gone)

    async def ask(self, op: str, seconds: float, kind: Kind | None, **fields: Any) -> Any:
        """The answer to a request about tasks of that kind. Raises EpisodeFailed."""
        quick = self.beginning if op == "reset" else self.quick
        if kind not in quick or len(request := json.dumps({"op": op, **fields})) > MAX_BATCHED:
            return await self._ask(op, seconds, lambda number: frame({"id": number, "op": op, **fields}))
        if not self._batch or len(self._batch) == MAX_BATCH:
            self._batch = list[tuple[str, asyncio.Future[Any]]]()
            self._asking = asyncio.create_task(self._ask_together(self._batch, seconds))
        waiting = asyncio.get_running_loop().create_future()
        self._batch.append((request, waiting))
        return await waiting

    async def _ask_together(self, batch: list[tuple[str, asyncio.Future[Any]]], seconds: float) -> None:
        """Ask what has been asked until this task runs, and hand out the answers."""
        if self._batch is batch:
            self._batch = []
        try:
            requests = [request for request, _ in batch]
            answers = await self._ask("batch", seconds, lambda number: batch_frame(number, requests))
            for (_, waiting), answer in zip(batch, answers, strict=True):
                _settle(waiting, answer)
        except Exception as error:  # noqa: BLE001 - raised where it was asked
            _fail_all([waiting for _, waiting in batch], error)

    async def _ask(self, op: str, seconds: float, framed: Callable[[int], bytes]) -> Any:
        async with self._turns:  # so that the time limit does not count a wait for other episodes
            if self._gone:
                raise EpisodeFailed("environment", self._gone)
            number = next(self._numbers)
            try:
                message = framed(number)
            except TooLarge as error:
                raise EpisodeFailed("harness", str(error)) from None
            answer = self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(seconds):
                    await self._send(message)
                    return await answer
            except TimeoutError:
                await self.end(f"{op} took more than {seconds:g} s")
                raise EpisodeFailed("environment", self._gone) from None
            finally:
                self._waiting.pop(number, None)

    async def _send(self, request: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # `_read` notices the end
            self._process.stdin.write(request)
            await self._process.stdin.drain()

    async def _read(self) -> None:
        """Hand out answers until the process ends, or answers what is none."""
        stream = self._process.stdout
        assert stream is not None
        try:
            while (line := await stream.readline()).endswith(b"\n"):
                answer = json.loads(line)
                if (waiting := self._waiting.get(answer["id"])) is not None:
                    _settle(waiting, answer)
            code = await self._process.wait()
            self._fail(f"it ended ({signal_name(-code) if code < 0 else f'code {code}'})")
        except (ValueError, KeyError) as error:
            self._fail(f"its answer cannot be read ({error!r:.200})")

    def _fail(self, why: str) -> None:
        """No more answers: kill the process and its children, and fail what waits."""
        self._gone = self._gone or f"the environment worker was lost: {why}"
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        _fail_all(self._waiting.values(), EpisodeFailed("environment", self._gone))

    async def end(self, why: str) -> None:
        """Kill it, and wait for its end."""
        self._fail(why)
        await asyncio.gather(self._reader, self._process.wait(), return_exceptions=True)

    async def close(self) -> None:
        """Let it give back what its episodes hold."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        await self.end("it was closed")


async def _import_error(python: Sequence[str], home: Path) -> str:
    """Why a Python cannot run a worker, if it lacks a package of ours or of the library."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *python, "-c", f"import {MODULE}", cwd=home, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), START_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        return ""
    missing = re.search(
        r"^ModuleNotFoundError: No module named '([^'.]+).*", said.decode(errors="replace"), re.MULTILINE
    )
    if missing is None:
        return ""
    install = f"install what is missing there:  {python[-1]} -m pip install {missing[1]}"
    return f"{python[-1]} -m {MODULE} failed: {missing[0]}; {install}"


def _settle(waiting: asyncio.Future[Any], answer: Mapping[str, Any]) -> None:
    """Hand out an answer, unless nobody waits for it any more."""
    if waiting.done():
        return
    if failed := answer.get("failed"):
        waiting.set_exception(EpisodeFailed(*failed))
    else:
        waiting.set_result(answer["value"])


def _fail_all(waiting: Iterable[asyncio.Future[Any]], error: Exception) -> None:
    for one in waiting:
        if not one.done():
            one.set_exception(error)
