"""Sends a workload and collects what was measured: at given times (open), by so many clients (closed), or both.

A request is sent at its time, or as soon after it as one of `clients` is free; waiting for that is not part of any
latency, but it is counted. The turns of a conversation follow one another. Ctrl-C (the task being cancelled) ends
what is under way and keeps what is done.
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

LAG_EVERY, TELL_EVERY = 0.02, 1.0  # seconds
CANCELLED = "cancelled"


@dataclass(frozen=True)
class Plan:
    """What is sent and when. `arrivals`: seconds from the start, one a conversation. `pause`: between turns."""

    conversations: Sequence[Conversation]
    arrivals: Sequence[float]
    clients: int | None = None
    pause: float = 0.0

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    @cached_property
    def is_closed(self) -> bool:
        """Whether nothing waits for a time, only for a client to be free."""
        return self.clients is not None and not any(self.arrivals)

    @cached_property
    def has_waves(self) -> bool:
        """Whether all clients start at once and then go on at their own pace."""
        return self.is_closed and len(self.conversations) > (self.clients or 0)


@dataclass
class Outcome:
    """A run as it was. Times are of the client's clock, in seconds.

    `late`: how much after its time each conversation was sent, because the client was busy. `lags`: how much later than
    asked the event loop woke. `num_held`: conversations whose time had come when no client was free. `running`: records
    of requests under way, by identity; `whole_tokens` and `whole_chunks` are sums over whole answers.
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
    whole_tokens: int = 0
    whole_chunks: int = 0
    num_chunks: int = 0
    cpu_seconds: float = 0.0


Tell = Callable[[Outcome, float], None]
"""Shows how far a run is at a time; called every second and at its end."""


async def run(client: Client, plan: Plan, tell: Tell | None = None) -> Outcome:
    """Send everything in `plan`. Cancelled, it returns what it has, with `partial` set."""
    loop = asyncio.get_running_loop()
    outcome = Outcome(plan, start=loop.time())
    slots = asyncio.Semaphore(plan.clients) if plan.clients is not None else None
    tasks: set[asyncio.Task[None]] = set()
    cpu, chunks = time.process_time(), client.num_chunks
    async with _watched(outcome, tell):
        try:
            for number, at in enumerate(plan.arrivals):
                if (early := outcome.start + at - loop.time()) > 0:
                    await asyncio.sleep(early)
                outcome.late.append(max(0.0, loop.time() - outcome.start - at))
                if slots is not None and plan.is_closed:  # at most one task a client; the others need not exist yet
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
            said = await _ask(client, outcome, record, prompt, conversation)
            if record.error is not None or turn + 1 == len(conversation.turns):
                break
            prompt = extend(prompt, said, conversation.turns[turn + 1])
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
        said = await client.ask(record, prompt, conversation.turns[record.turn].max_tokens, conversation.tools)
    finally:
        del outcome.running[id(record)]
    outcome.num_ended += 1
    if record.error is None:
        outcome.whole_tokens += record.num_tokens
        outcome.whole_chunks += len(record.arrivals)
    else:
        outcome.num_failed += 1
    return said


@asynccontextmanager
async def _watched(outcome: Outcome, tell: Tell | None) -> AsyncGenerator[None, None]:
    """Measures the event loop's lag and tells of the run, while it lasts and once at its end."""
    watchers = [asyncio.create_task(_measure_lag(outcome.lags))]
    if tell is not None:
        watchers.append(asyncio.create_task(_tell_often(outcome, tell)))
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()
        for watcher in watchers:
            with suppress(asyncio.CancelledError):
                await watcher
        if tell is not None:
            tell(outcome, asyncio.get_running_loop().time())


async def _measure_lag(lags: "array[float]") -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EVERY
        await asyncio.sleep(LAG_EVERY)
        lags.append(max(0.0, loop.time() - due))


async def _tell_often(outcome: Outcome, tell: Tell) -> None:
    while True:
        await asyncio.sleep(TELL_EVERY)
        tell(outcome, asyncio.get_running_loop().time())
