"""Sends a workload and records its requests: an open load with given arrival times, a closed load of clients, or both.

A request is sent at its arrival time, or as soon afterwards as one of `clients` is free. That wait is not part of any
latency, but such requests are counted. The turns of a conversation are sent one after the other. Ctrl-C (cancellation
of the task) aborts running requests and keeps finished ones.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property

from glm5.bench.serve.api_formats import Prompt
from glm5.bench.serve.client import Client, ReplyText
from glm5.bench.serve.record import Record
from glm5.bench.serve.workload import Conversation, extend

LAG_EVERY, REPORT_EVERY = 0.02, 1.0  # seconds
CANCELLED = "cancelled"


@dataclass(frozen=True)
class Plan:
    """The load of a run. `arrivals`: seconds from the start, one per conversation. `pause`: seconds between turns."""

    conversations: Sequence[Conversation]
    arrivals: Sequence[float]
    clients: int | None = None
    pause: float = 0.0

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    @cached_property
    def is_closed(self) -> bool:
        """Whether requests wait only for a free client, not for an arrival time."""
        return self.clients is not None and not any(self.arrivals)

    @cached_property
    def has_waves(self) -> bool:
        """Whether all clients start at once and then send more requests."""
        return self.is_closed and len(self.conversations) > (self.clients or 0)


@dataclass
class Outcome:
    """The records of a run. Times are of the client's clock, in seconds.

    `late`: delay of each conversation's start after its arrival time, because the client was busy. `lags`: delays of
    the event loop's timer. `num_held`: conversations that had to wait for a free client. `running`: records of running
    requests by identity. `completed_tokens` and `completed_chunks`: sums over complete answers.
    """

    plan: Plan
    start: float = 0.0
    end: float = 0.0
    partial: bool = False
    records: list[Record] = field(default_factory=list[Record])
    late: "array[float]" = field(default_factory=lambda: array("d"))
    lags: "array[float]" = field(default_factory=lambda: array("d"))
    num_held: int = 0
    running: dict[int, Record] = field(default_factory=dict[int, Record])
    num_ended: int = 0
    num_failed: int = 0
    completed_tokens: int = 0
    completed_chunks: int = 0
    num_chunks: int = 0
    cpu_seconds: float = 0.0


Report = Callable[[Outcome, float], None]
"""Shows the progress of a run at a time; called every second and at the end."""


async def run(client: Client, plan: Plan, report: Report | None = None) -> Outcome:
    """Send everything in `plan`. If cancelled, returns the records so far, with `partial` set."""
    loop = asyncio.get_running_loop()
    outcome = Outcome(plan, start=loop.time())
    slots = asyncio.Semaphore(plan.clients) if plan.clients is not None else None
    tasks: set[asyncio.Task[None]] = set()
    cpu, chunks = time.process_time(), client.num_chunks
    async with _watched(outcome, report):
        try:
            for number, at in enumerate(plan.arrivals):
                if (early := outcome.start + at - loop.time()) > 0:
                    await asyncio.sleep(early)
                outcome.late.append(max(0.0, loop.time() - outcome.start - at))
                if slots is not None and plan.is_closed:  # at most one task per client
                    await slots.acquire()
                tasks.add(asyncio.create_task(_converse(client, outcome, number, slots)))
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            outcome.partial = True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    outcome.end = loop.time()
    outcome.cpu_seconds, outcome.num_chunks = time.process_time() - cpu, client.num_chunks - chunks
    return outcome


async def _converse(client: Client, outcome: Outcome, number: int, slots: asyncio.Semaphore | None) -> None:
    plan = outcome.plan
    conversation = plan.conversations[number]
    first_wave = plan.has_waves and number < (plan.clients or 0)
    prompt = conversation.turns[0].content
    loop = asyncio.get_running_loop()
    due = loop.time() if plan.is_closed else outcome.start + plan.arrivals[number]
    if slots is not None and not plan.is_closed:
        outcome.num_held += slots.locked()
        await slots.acquire()
    try:
        for turn in range(len(conversation.turns)):
            record = Record(number, turn, first_wave and turn == 0, due, error=CANCELLED)
            reply = await _ask(client, outcome, record, prompt, conversation)
            if record.error is not None or turn + 1 == len(conversation.turns):
                break
            prompt = extend(prompt, reply, conversation.turns[turn + 1])
            if plan.pause > 0:
                await asyncio.sleep(plan.pause)
            due = loop.time()
    finally:
        if slots is not None:
            slots.release()


async def _ask(
    client: Client, outcome: Outcome, record: Record, prompt: Prompt, conversation: Conversation
) -> ReplyText:
    outcome.records.append(record)
    outcome.running[id(record)] = record
    try:
        reply = await client.ask(record, prompt, conversation.turns[record.turn].max_tokens, conversation.tools)
    finally:
        del outcome.running[id(record)]
    outcome.num_ended += 1
    if record.error is None:
        outcome.completed_tokens += record.num_tokens
        outcome.completed_chunks += len(record.arrivals)
    else:
        outcome.num_failed += 1
    return reply


@asynccontextmanager
async def _watched(outcome: Outcome, report: Report | None) -> AsyncGenerator[None, None]:
    """Measures the event loop's lag and reports progress during the run, and once at its end."""
    watchers = [asyncio.create_task(_measure_lag(outcome.lags))]
    if report is not None:
        watchers.append(asyncio.create_task(_report_often(outcome, report)))
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()
        for watcher in watchers:
            with suppress(asyncio.CancelledError):
                await watcher
        if report is not None:
            report(outcome, asyncio.get_running_loop().time())


async def _measure_lag(lags: "array[float]") -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EVERY
        await asyncio.sleep(LAG_EVERY)
        lags.append(max(0.0, loop.time() - due))


async def _report_often(outcome: Outcome, report: Report) -> None:
    while True:
        await asyncio.sleep(REPORT_EVERY)
        report(outcome, asyncio.get_running_loop().time())
