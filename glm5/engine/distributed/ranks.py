"""The first rank's side of an engine over several: it starts the others, tells them what it hears, and ends with them.

    what schedulers hear                         before each plan (`RankedRunner`)
    masks of grammars                            before each launch
    pages that came back from lower tiers        likewise (`LoadedPages`)
    new weights, sleep, wake                     every rank its own part (`RankedWeights`, `RankedCache`)
    a rank that dies, hangs or stays silent      the engine's end, with that rank's reason

Where a step hangs, a rank that was silent meanwhile is what it waited for, and is named in place of the one that hung.

Everything else, from requests to text, happens here alone.
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
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch import Tensor

import glm5
from glm5.common.background import in_background
from glm5.common.errors import GlmError, named
from glm5.engine.core.interfaces import Launched, Memory, StepRunner, WeightSource
from glm5.engine.distributed.loaded_pages import LoadedPages
from glm5.engine.distributed.rank_wire import (
    Begin,
    Discard,
    End,
    Masks,
    Order,
    RankReply,
    ReleaseCache,
    ReleaseWeights,
    RestoreCache,
    RestoreWeights,
    Stage,
    Swap,
    Turn,
    WeightsChanged,
    digest_of,
    encoded,
)
from glm5.engine.runner.result import StepResult
from glm5.engine.runner.runner import SeqSpec
from glm5.engine.scheduler.messages import Message, Submit
from glm5.engine.scheduler.plan import StepPlan
from glm5.engine.transport.failure import HUNG, LOST, reason_of_exit, silence
from glm5.engine.transport.wire import Beat, Dead, Start

logger = logging.getLogger(__name__)

START_SECONDS = 60.0  # a rank may take so much longer to say its first word
_LEAVE_SECONDS = 5.0  # to end in order
_CAUSE_SECONDS = 0.3  # what one rank dies of may be another's death


class Life(Protocol):
    """The process that this rank is. `end` ends it, and the others with it: the first call of all."""

    def end(self, last_words: Dead, code: int) -> Any: ...


class _Rank:
    """One of the others: its process, and the thread that listens to it."""

    def __init__(self, number: int, ranks: "Ranks"):
        self.number, self.ranks = number, ranks
        command = [sys.executable, "-m", "glm5.engine.rank"]
        home, pipe = Path(glm5.__file__).parents[1], subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=home, stdin=pipe, stdout=pipe)
        self.heard_at, self.has_spoken = time.monotonic(), False
        self.last_words: Dead | None = None
        threading.Thread(target=self._listen, name=f"glm5-rank-{number}", daemon=True).start()

    @property
    def silent(self) -> float:
        """Seconds since its last sign of life, or its start."""
        return time.monotonic() - self.heard_at

    def tell(self, order: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the thread that listens knows
            self.process.stdin.write(order)
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(msgspec.DecodeError):  # what a library wrote before stdout was taken from it
                match msgspec.json.decode(line, type=Beat | Dead | RankReply):
                    case RankReply() as said:
                        self.ranks.heard(self.number, said)
                    case Dead() as dead:
                        self.last_words = dead
                    case Beat():
                        pass
                self.heard_at, self.has_spoken = time.monotonic(), True
        self.ranks.lost(self.number, self.last_words, self.process.wait())


class Ranks:
    """The other `size - 1` ranks. `life`: of this process, which a rank's end ends."""

    def __init__(self, start: Start, size: int, port: int, life: Life):
        self.size, self._life = size, life
        self._patience: float = start.config["watchdog_timeout"]
        self._calls = itertools.count()
        self._waiting: dict[tuple[int, int], Future[RankReply]] = {}
        self._is_closing, self._has_lost = False, threading.Event()
        self._others = [_Rank(number, self) for number in range(1, size)]
        for rank in self._others:
            rank.tell(encoded(Begin(start, rank.number, size, port)))
        threading.Thread(target=self._watch, name="glm5-ranks", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._others]

    def tell(self, order: Order) -> None:
        """All of them. Any thread may."""
        data = encoded(order)
        for rank in self._others:
            rank.tell(data)

    def ask(self, make: Callable[[int], Order]) -> list["Future[RankReply]"]:
        """Tell them something that is answered; one future each."""
        call = next(self._calls)
        futures = [self._waiting.setdefault((rank.number, call), Future()) for rank in self._others]
        self.tell(make(call))
        return futures

    def heard(self, number: int, said: RankReply) -> None:
        self._waiting.pop((number, said.call)).set_result(said)

    def lost(self, number: int, last_words: Dead | None, code: int) -> None:
        """A rank has ended: so does this process, unless it ends anyway."""
        if self._is_closing:
            return
        self._has_lost.set()
        if code >= 0:  # perhaps because another one was killed: that is the reason to tell
            time.sleep(_CAUSE_SECONDS)
            killed = [rank for rank in self._others if (rank.process.poll() or 0) < 0]
            if killed and not self._is_closing:
                number, last_words, code = killed[0].number, None, killed[0].process.returncode
        if self._is_closing:
            return
        self._is_closing = True
        if last_words is not None and last_words.kind != "EngineDead":  # a mistake of whoever started it
            self._life.end(last_words, 1)
        reason = last_words.reason if last_words is not None else reason_of_exit(code)
        reason = (self.held_up_by(number) if code == HUNG else None) or f"rank {number} of {self.size}: {reason}"
        self._life.end(Dead(reason), LOST)

    def held_up_by(self, rank: int) -> str | None:
        """Why a step of `rank` hangs, where another one was silent for most of the time: it was stopped, or hangs."""
        meanwhile = f", while a step of rank {rank} hung"
        for other in self._others:
            if other.number != rank and other.process.poll() is None and other.silent > self._patience / 2:
                return self._silence(other, meanwhile)
        return None

    def explain(self) -> None:
        """Called when something failed here: if it did because a rank has gone, wait for that one's words to end this
        process."""
        if self._has_lost.wait(1.0):
            time.sleep(_LEAVE_SECONDS)

    def close(self) -> None:
        self._is_closing = True
        self.tell(End())
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
        """A rank that was stopped says nothing, not even that it hangs."""
        pause = threading.Event()
        while not pause.wait(min(1.0, self._patience / 4)):
            for rank in self._others:
                allowed = self._patience + (0.0 if rank.has_spoken else START_SECONDS)
                if rank.silent > allowed and not self._is_closing:
                    self._life.end(Dead(self._silence(rank)), LOST)

    def _silence(self, rank: _Rank, meanwhile: str = "") -> str:
        reason = silence(rank.process.pid, rank.silent, self._patience, meanwhile)
        return f"rank {rank.number} of {self.size}: {reason}"


class RankedRunner:
    """The runner of the first rank, which has the others do the same."""

    def __init__(self, runner: StepRunner, ranks: Ranks, pages: LoadedPages):
        self.runner, self.ranks, self.pages = runner, ranks, pages
        self._messages: list[Message] = []
        self._is_masked = False
        self._masks: tuple[list[int], Tensor] | None = None
        self._digest = 0

    def broadcast(self, step: int, messages: list[Message], specs: Mapping[int, SeqSpec], *, is_masked: bool) -> None:
        """See `Followers`. Others plan while this rank does."""
        submitted = [message.seq_ids for message in messages if isinstance(message, Submit)]
        new = {seq_id: specs[seq_id] for seq_ids in submitted for seq_id in seq_ids}
        self.ranks.tell(Turn(step, messages, new, self._digest, is_masked))
        self._messages, self._is_masked = messages, is_masked

    def close(self) -> None:
        self.ranks.close()

    def permit(self, slots: list[int], masks_BJM: Tensor) -> None:
        assert self._is_masked, f"{slots=}"
        self._masks = slots, masks_BJM.clone()
        self.runner.permit(slots, masks_BJM)

    def launch(self, plan: StepPlan, specs: Mapping[int, SeqSpec]) -> Launched:
        if self._is_masked:
            self.ranks.tell(Masks(self._masks))
        self.pages.share(self._messages)
        self._messages, self._masks = [], None
        launched = self.runner.launch(plan, specs)
        self.pages.expect(plan)
        return _Noted(launched, lambda result: self._note(plan.step, result))

    def weights_changed(self) -> None:
        self.ranks.tell(WeightsChanged())
        self.runner.weights_changed()

    def _note(self, step: int, result: StepResult) -> None:
        self._digest = digest_of(self._digest, step, result.tokens)


class _Noted:
    def __init__(self, launched: Launched, note: Callable[[StepResult], None]):
        self._launched, self._note = launched, note

    def read(self) -> StepResult:
        result = self._launched.read()
        self._note(result)
        return result


class RankedWeights:
    """The weights of all ranks: see `WeightSource`. Refused by one is refused by all."""

    def __init__(self, weights: WeightSource, ranks: Ranks):
        self._mine, self._ranks = weights, ranks
        self._level = 0  # of the last sleep

    @property
    def version(self) -> int:
        return self._mine.version

    @property
    def identity(self) -> bytes:
        return self._mine.identity

    def stage(self, folder: Path) -> "Future[Any]":
        others = self._ranks.ask(lambda call: Stage(call, folder))
        mine = self._mine.stage(folder)

        def wait() -> Any:
            try:
                staged = mine.result()
                _raise_first(others)
            except Exception:
                self._ranks.tell(Discard())
                raise
            return staged

        return in_background(wait, "glm5-ranks-stage")

    def swap(self, staged: Any, version: int) -> None:
        self._ranks.tell(Swap(version))
        self._mine.swap(staged, version)

    def take_changes(self, version: int, *, closely: bool) -> bool:
        return False  # ranks share no model with anybody

    def check_source(self) -> None:
        self._mine.check_source()

    def release(self, level: int) -> int:
        self._level = level
        others = self._ranks.ask(lambda call: ReleaseWeights(call, level))
        return self._mine.release(level) + sum(_raise_first(others))

    def restore(self) -> bool:
        others = self._ranks.ask(RestoreWeights)
        try:
            is_other = self._mine.restore()
            _raise_first(others)
        except GlmError:
            _wait_for(others)
            self.release(self._level)
            raise
        return is_other


class RankedCache:
    """The caches of all ranks."""

    def __init__(self, cache: Memory, ranks: Ranks):
        self._mine, self._ranks = cache, ranks

    def release_memory(self) -> int:
        others = self._ranks.ask(ReleaseCache)
        return self._mine.release_memory() + sum(_raise_first(others))

    def restore_memory(self) -> None:
        others = self._ranks.ask(RestoreCache)
        try:
            self._mine.restore_memory()
            _raise_first(others)
        except GlmError:
            _wait_for(others)
            self.release_memory()
            raise


def _wait_for(others: list["Future[RankReply]"]) -> None:
    for future in others:
        future.result()


def _raise_first(others: list["Future[RankReply]"]) -> list[int]:
    """Their numbers; the first error of any of them is raised. (A rank that dies ends this process.)"""
    answers = [future.result() for future in others]
    for said in answers:
        if said.error is not None:
            raise named(said.kind, said.error)
    return [said.number for said in answers]
