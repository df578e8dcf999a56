"""The engine of a rank other than the first: it executes the first rank's orders.

It has a scheduler and a runner like the first rank, receives the same scheduler messages, and so computes the same
steps. It has no clients, so no text, no grammars and no calls.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from glm5.common.errors import GlmError, reason_of, words_of
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
)
from glm5.engine.runner.runner import SeqSpec
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import Message
from glm5.engine.scheduler.plan import StepPlan
from glm5.engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Follower:
    """The engine of one rank other than the first. `send_reply` sends to the first rank."""

    def __init__(
        self,
        runner: StepRunner,
        config: SchedulerConfig,
        *,
        weights: WeightSource,
        cache: Memory,
        pages: LoadedPages,
        send_reply: Callable[[RankReply], None],
    ):
        self.runner, self.config, self.pages, self.send_reply = runner, config, pages, send_reply
        self.weights, self.cache = weights, cache
        self.scheduler = Scheduler(config, version=weights.version, identity=weights.identity)
        self._specs: dict[int, SeqSpec] = {}
        self._planned: tuple[StepPlan, list[Message]] | None = None
        self._unread: deque[tuple[StepPlan, Launched]] = deque()
        self._staged: Any = None
        self._digest = 0

    def execute(self, order: Order) -> None:
        """Execute an order of the first rank."""
        match order:
            case PlanStep():
                self._plan(order)
                if not order.is_masked:
                    self._launch()
            case Masks(masks=masks):
                if masks is not None:
                    self.runner.set_bitmasks(*masks)
                self._launch()
            case Stage(call=call, folder=folder):
                self._staged = future = self.weights.stage(folder)
                self._reply_when_done(call, future)
            case PreparePush(call=call, push=push):
                self._reply_when_done(call, self.weights.prepare(push))
            case CheckBucket(call=call, number=number, checksum=checksum):
                self._reply_when_done(call, self.weights.check_sum(number, checksum))
            case WriteBucket(call=call, number=number):
                self._reply_when_done(call, self.weights.write(number))
            case EndPush(version=version):
                self.weights.end_push(version)
            case Swap(version=version):
                self.weights.swap(self._staged.result(), version)
                self._staged = None
            case Discard():
                self._staged = None
            case ReleaseWeights(call=call, level=level):
                self.send_reply(RankReply(call, self.weights.release(level)))
            case RestoreWeights(call=call):
                self.send_reply(_reply_after(call, self.weights.restore))
            case ReleaseCache(call=call):
                self.send_reply(RankReply(call, self.cache.release_memory()))
            case RestoreCache(call=call):
                self.send_reply(_reply_after(call, self.cache.restore_memory))
            case WeightsChanged():
                self.runner.weights_changed()
            case Begin() | End():
                raise AssertionError(f"{order=}")

    def _reply_when_done(self, call: int, future: "Future[Any]") -> None:
        future.add_done_callback(lambda done: self.send_reply(_reply(call, done.exception())))

    def _plan(self, order: PlanStep) -> None:
        """Plan a step. With `_launch`, it does what `EngineCore.step` does, without clients."""
        if order.digest != self._digest:
            raise RuntimeError(f"ranks differ in the tokens before step {order.step}; they must compute the same bits")
        self._specs |= order.specs
        self.scheduler.deliver(order.step, order.messages)
        plan = self.scheduler.plan(order.step)
        for output in plan.ended:
            self._specs.pop(output.seq_id, None)
        self._planned = plan, order.messages

    def _launch(self) -> None:
        assert self._planned is not None, "no step was planned"
        (plan, messages), self._planned = self._planned, None
        self.pages.share(messages)
        launched = self.runner.launch(plan, self._specs)
        self.pages.expect(plan)
        if plan.items:
            self._unread.append((plan, launched))
        num_unread = 1 if self.config.launch_ahead and plan.items else 0
        while len(self._unread) > num_unread:
            read, launched = self._unread.popleft()
            tokens = launched.read().tokens
            self._digest = digest_of(self._digest, read.step, tokens)
            for output in self.scheduler.apply(read.step, tokens).ended:
                self._specs.pop(output.seq_id, None)


def _reply_after(call: int, action: Callable[[], object]) -> RankReply:
    try:
        action()
    except GlmError as error:
        return _reply(call, error)
    return RankReply(call)


def _reply(call: int, error: BaseException | None) -> RankReply:
    if error is None:
        return RankReply(call)
    if isinstance(error, GlmError):
        return RankReply(call, error=words_of(error), kind=type(error).__name__)
    return RankReply(call, error=reason_of(error))
