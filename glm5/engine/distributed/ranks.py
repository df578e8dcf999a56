"""The first rank of a tensor-parallel engine: it starts the others, broadcasts its inputs to them, and ends with them.

    scheduler messages                           broadcast before each plan (`RankedRunner`)
    grammar bitmasks                             broadcast before each launch
    pages loaded from lower tiers                likewise (`LoadedPages`)
    new weights, sleep, wake                     every rank handles its own shard (`RankedWeights`, `RankedCache`)
    a rank dies, hangs or sends no heartbeat     the engine ends with that rank's reason

A step that hangs may be waiting for another rank. If one has sent no heartbeat meanwhile, the error names that one.

Everything else, from requests to text, happens on the first rank alone.
"""

import itertools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from torch import Tensor

from glm5.common.background import in_background
from glm5.common.errors import GlmError, named
from glm5.common.watching import reason_of_silence
from glm5.engine.core.interfaces import Launched, Memory, StepRunner, WeightSource
from glm5.engine.distributed.loaded_pages import LoadedPages
from glm5.engine.distributed.rank_wire import (
    Begin,
    CheckBucket,
    Discard,
    End,
    EndPush,
    Masks,
    Order,
    PlanStep,
    PreparePush,
    RankReply,
    ReleaseCache,
    ReleaseWeights,
    RestoreCache,
    RestoreWeights,
    Stage,
    Swap,
    WeightsChanged,
    WriteBucket,
    digest_of,
    encoded,
)
from glm5.engine.runner.result import StepResult
from glm5.engine.runner.runner import SeqSpec
from glm5.engine.scheduler.messages import Message, Submit
from glm5.engine.scheduler.plan import StepPlan
from glm5.engine.transport.failure import HUNG, LOST, reason_of_exit
from glm5.engine.transport.wire import Beat, Dead, PushCall, Start

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

START_SECONDS = 60.0  # added to the watchdog timeout for a rank's first message
_LEAVE_SECONDS = 5.0  # for a rank to exit by itself
_CAUSE_SECONDS = 0.3  # a rank may have failed because another one was killed: wait for that exit code


class OwnProcess(Protocol):
    """The first rank's own process. `end` ends it and the other ranks; only the first call counts."""

    def end(self, death: Dead, code: int) -> Any: ...


class _Rank:
    """One of the other ranks: its process, and the thread that receives its messages."""

    def __init__(self, number: int, ranks: "Ranks"):
        self.number, self.ranks = number, ranks
        command = [sys.executable, "-m", "glm5.engine.rank"]
        home, pipe = Path(str(files("glm5"))).parent, subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=home, stdin=pipe, stdout=pipe)
        self.last_sign_at, self.has_sent = time.monotonic(), False
        self.death: Dead | None = None
        threading.Thread(target=self._listen, name=f"glm5-rank-{number}", daemon=True).start()

    @property
    def seconds_silent(self) -> float:
        """Seconds since its last message, or its start."""
        return time.monotonic() - self.last_sign_at

    def send(self, order: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the receiving thread handles that
            self.process.stdin.write(order)
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(msgspec.DecodeError):  # what a library printed before `take_stdout`
                match msgspec.json.decode(line, type=Beat | Dead | RankReply):
                    case RankReply() as reply:
                        self.ranks.receive_reply(self.number, reply)
                    case Dead() as dead:
                        self.death = dead
                    case Beat():
                        pass
                self.last_sign_at, self.has_sent = time.monotonic(), True
        self.ranks.rank_exited(self.number, self.death, self.process.wait())


class Ranks:
    """The other `size - 1` ranks. `own_process` ends when one of them does."""

    def __init__(self, start: Start, size: int, port: int, own_process: OwnProcess):
        self.size, self._process = size, own_process
        self._watchdog_timeout: float = start.config["watchdog_timeout"]
        self._calls = itertools.count()
        self._waiting: dict[tuple[int, int], Future[RankReply]] = {}
        self._is_closing, self._has_lost = False, threading.Event()
        self._others = [_Rank(number, self) for number in range(1, size)]
        for rank in self._others:
            rank.send(encoded(Begin(start, rank.number, size, port)))
        threading.Thread(target=self._watch, name="glm5-ranks", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._others]

    def broadcast(self, order: Order) -> None:
        """Send an order to all of them, from any thread."""
        data = encoded(order)
        for rank in self._others:
            rank.send(data)

    def call(self, make: Callable[[int], Order]) -> list["Future[RankReply]"]:
        """Broadcast an order that is answered; one future for each rank."""
        call = next(self._calls)
        futures = [self._waiting.setdefault((rank.number, call), Future()) for rank in self._others]
        self.broadcast(make(call))
        return futures

    def receive_reply(self, number: int, reply: RankReply) -> None:
        self._waiting.pop((number, reply.call)).set_result(reply)

    def rank_exited(self, number: int, death: Dead | None, code: int) -> None:
        """End this process because a rank has ended, unless it is closing anyway."""
        if self._is_closing:
            return
        self._has_lost.set()
        if code >= 0:  # perhaps because another one was killed: then report that one
            time.sleep(_CAUSE_SECONDS)
            killed = [rank for rank in self._others if (rank.process.poll() or 0) < 0]
            if killed and not self._is_closing:
                number, death, code = killed[0].number, None, killed[0].process.returncode
        if self._is_closing:
            return
        self._is_closing = True
        if death is not None and death.kind != "EngineDead":  # an error of the user, at the start
            self._process.end(death, 1)
        reason = death.reason if death is not None else reason_of_exit(code)
        reason = (self.cause_of_hang(number) if code == HUNG else None) or f"rank {number} of {self.size}: {reason}"
        self._process.end(Dead(reason), LOST)

    def cause_of_hang(self, rank: int) -> str | None:
        """Why a step of `rank` hangs, if another rank sent no heartbeat for most of the time; else None."""
        meanwhile = f", while a step of rank {rank} hung"
        for other in self._others:
            is_alive = other.process.poll() is None
            if other.number != rank and is_alive and other.seconds_silent > self._watchdog_timeout / 2:
                return self._silence(other, meanwhile)
        return None

    def wait_for_cause(self) -> None:
        """Call it after a failure here. If a rank has ended, it waits until that rank's reason ends this process."""
        if self._has_lost.wait(1.0):
            time.sleep(_LEAVE_SECONDS)

    def close(self) -> None:
        self._is_closing = True
        self.broadcast(End())
        for rank in self._others:
            try:
                rank.process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                rank.process.kill()

    def kill(self) -> None:
        self._is_closing = True
        for rank in self._others:
            rank.process.kill()

    def _watch(self) -> None:
        """End the engine when a rank sends no heartbeat, as one that was stopped."""
        pause = threading.Event()
        while not pause.wait(min(1.0, self._watchdog_timeout / 4)):
            for rank in self._others:
                allowed = self._watchdog_timeout + (0.0 if rank.has_sent else START_SECONDS)
                if rank.seconds_silent > allowed and not self._is_closing:
                    self._process.end(Dead(self._silence(rank)), LOST)

    def _silence(self, rank: _Rank, meanwhile: str = "") -> str:
        reason = reason_of_silence(rank.process.pid, rank.seconds_silent, self._watchdog_timeout, meanwhile)
        return f"rank {rank.number} of {self.size}: {reason}"


class RankedRunner:
    """The first rank's runner; it makes the other ranks run the same steps."""

    def __init__(self, runner: StepRunner, ranks: Ranks, pages: LoadedPages):
        self.runner, self.ranks, self.pages = runner, ranks, pages
        self._messages: list[Message] = []
        self._is_masked = False
        self._masks: tuple[list[int], Tensor] | None = None
        self._digest = 0

    def broadcast(self, step: int, messages: list[Message], specs: Mapping[int, SeqSpec], *, is_masked: bool) -> None:
        """See `Followers`. The other ranks plan while this one does."""
        submitted = [message.seq_ids for message in messages if isinstance(message, Submit)]
        new = {seq_id: specs[seq_id] for seq_ids in submitted for seq_id in seq_ids}
        self.ranks.broadcast(PlanStep(step, messages, new, self._digest, is_masked))
        self._messages, self._is_masked = messages, is_masked

    def close(self) -> None:
        self.ranks.close()

    def set_bitmasks(self, slots: list[int], bitmasks: Tensor) -> None:
        assert self._is_masked, f"{slots=}"
        self._masks = slots, bitmasks.clone()
        self.runner.set_bitmasks(slots, bitmasks)

    def launch(self, plan: StepPlan, specs: Mapping[int, SeqSpec]) -> Launched:
        if self._is_masked:
            self.ranks.broadcast(Masks(self._masks))
        self.pages.share(self._messages)
        self._messages, self._masks = [], None
        launched = self.runner.launch(plan, specs)
        self.pages.expect(plan)
        return _DigestedLaunch(launched, lambda result: self._note(plan.step, result))

    def weights_changed(self) -> None:
        self.ranks.broadcast(WeightsChanged())
        self.runner.weights_changed()

    def _note(self, step: int, result: StepResult) -> None:
        self._digest = digest_of(self._digest, step, result.tokens)


class _DigestedLaunch:
    def __init__(self, launched: Launched, note: Callable[[StepResult], None]):
        self._launched, self._note = launched, note

    def read(self) -> StepResult:
        result = self._launched.read()
        self._note(result)
        return result


class RankedWeights:
    """The weights of all ranks: see `WeightSource`. If one rank refuses new weights, none uses them."""

    def __init__(self, weights: WeightSource, ranks: Ranks):
        self._own, self._ranks = weights, ranks
        self._level = 0  # of the last sleep

    @property
    def version(self) -> int:
        return self._own.version

    @property
    def identity(self) -> bytes:
        return self._own.identity

    def stage(self, folder: Path) -> "Future[Any]":
        others = self._ranks.call(lambda call: Stage(call, folder))
        return self._by_all(others, self._own.stage(folder), lambda: self._ranks.broadcast(Discard()))

    def swap(self, staged: Any, version: int) -> None:
        self._ranks.broadcast(Swap(version))
        self._own.swap(staged, version)

    def prepare(self, push: PushCall) -> "Future[bool]":
        others = self._ranks.call(lambda call: PreparePush(call, push))
        return self._by_all(others, self._own.prepare(push))

    def check_sum(self, number: int, checksum: int) -> "Future[None]":
        others = self._ranks.call(lambda call: CheckBucket(call, number, checksum))
        return self._by_all(others, self._own.check_sum(number, checksum))

    def write(self, number: int) -> "Future[None]":
        others = self._ranks.call(lambda call: WriteBucket(call, number))
        return self._by_all(others, self._own.write(number))

    def end_push(self, version: int | None) -> None:
        self._ranks.broadcast(EndPush(version))
        self._own.end_push(version)

    def _by_all(
        self, others: list["Future[RankReply]"], own: "Future[Result]", undo: Callable[[], object] = lambda: None
    ) -> "Future[Result]":
        """The result of this rank, once all have succeeded; else the first error, after `undo`."""

        def wait() -> Result:
            try:
                result = own.result()
                _raise_first(others)
            except Exception:
                undo()
                raise
            return result

        return in_background(wait, "glm5-ranks-weights")

    def take_changes(self, version: int, *, closely: bool) -> bool:
        return False  # a model over several ranks is never shared with a trainer

    def check_source(self) -> None:
        self._own.check_source()

    def release(self, level: int) -> int:
        self._level = level
        others = self._ranks.call(lambda call: ReleaseWeights(call, level))
        return self._own.release(level) + sum(_raise_first(others))

    def restore(self) -> bool:
        others = self._ranks.call(RestoreWeights)
        try:
            is_other = self._own.restore()
            _raise_first(others)
        except GlmError:
            _wait_for(others)
            self.release(self._level)
            raise
        return is_other


class RankedCache:
    """The caches of all ranks."""

    def __init__(self, cache: Memory, ranks: Ranks):
        self._own, self._ranks = cache, ranks

    def release_memory(self) -> int:
        others = self._ranks.call(ReleaseCache)
        return self._own.release_memory() + sum(_raise_first(others))

    def restore_memory(self) -> None:
        others = self._ranks.call(RestoreCache)
        try:
            self._own.restore_memory()
            _raise_first(others)
        except GlmError:
            _wait_for(others)
            self.release_memory()
            raise


def _wait_for(others: list["Future[RankReply]"]) -> None:
    for future in others:
        future.result()


def _raise_first(others: list["Future[RankReply]"]) -> list[int]:
    """The numbers of all replies; raises the first error among them. (A rank that dies ends this process.)"""
    replies = [future.result() for future in others]
    for reply in replies:
        if reply.error is not None:
            raise named(reply.kind, reply.error)
    return [reply.number for reply in replies]
