"""Runs requests of every API on the engine, and parses their answers.

    job = Job(id, prompt_ids, params, options, reader)
    await check(job, service)                          # errors that must come before the status line is sent
    async for step in steps(job, service, usage): ...  # leaving it aborts the request

An API converts its request body into a job, and steps into its response; it accesses the engine only through them.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import msgspec

from glm5.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallEnd
from glm5.chat.parser import CALL, THINK_END, Functions, OutputParser
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import EngineDead
from glm5.engine.frontend.outputs import Delta, Logprob
from glm5.engine.frontend.request_builder import Options
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import RoutedExperts
from glm5.serve.http.call import caller
from glm5.serve.http.errors import ApiError, named
from glm5.serve.http.sse import Tap
from glm5.serve.service.service import Service
from glm5.serve.service.sessions import Recording

logger = logging.getLogger(__name__)

SERVER_CLOSING = "server_closing"

LogprobRow = dict[int, Logprob]  # the token itself first, then the likeliest
LEAST_LOGPROB = -9999.0  # vLLM's for a token that could not be sampled: JSON has no infinity


@dataclass(frozen=True)
class Reader:
    """How an answer is parsed. `reasoning`: it begins inside reasoning. `parse_tools`: it may contain calls, with
    `only_offered` of `functions` alone."""

    tokenizer: Tokenizer
    functions: Functions | None = None
    reasoning: bool = False
    parse_tools: bool = False
    only_offered: bool = False

    def parser(self) -> OutputParser:
        """A new parser for one answer."""
        return OutputParser(
            self.tokenizer,
            self.functions,
            reasoning=self.reasoning,
            parse_tools=self.parse_tools,
            only_offered=self.only_offered,
        )


@dataclass(frozen=True)
class Job:
    """A request that is ready for the engine. `id`: the id under which its tenant may abort it. `reader` None: the
    answer is plain text. `names`: {name in `SamplingParams`: the API's name} for error messages. `processed`: the
    `logprob` of each token is its `tempered`; None: if the server says so. `streams`: the client wants tokens as they
    come; otherwise the steps after an answer's first are one. `recording`: of a session, which gets the answers.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    options: Options = field(default_factory=Options)
    reader: Reader | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    processed: bool | None = None
    streams: bool = False
    recording: Recording | None = None


class Step(msgspec.Struct, frozen=True):
    """What engine steps, `num_steps`, added to answer `index`; the concatenated steps are the answer.

    `token_ids`: all new tokens, the one that ended the answer included. `logprobs`: one row for each of them, if
    requested; `sampling_mask`: likewise (`wire.Update`). `prompt_logprobs`: rows of the prompt's tokens except the
    first; set on one step of the request.
    `finish_reason`: set on the last step of each index to "stop", "length", "tool_calls", or "abort" for an aborted
    request. `version`: the version of the weights.
    """

    index: int
    events: Sequence[Event]
    token_ids: Sequence[int]
    logprobs: Sequence[LogprobRow] | None = None
    prompt_logprobs: Sequence[LogprobRow] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    routed_experts: RoutedExperts | None = None
    sampling_mask: Sequence[bytes] = ()
    version: int = 0
    num_steps: int = 1

    @property
    def text(self) -> str:
        """The content: without reasoning and tool calls."""
        return "".join([event.text for event in self.events if isinstance(event, ContentDelta)])


@runtime_checkable
class Divertible(Protocol):
    """Deltas that can be given to a function as they arrive."""

    def divert(self, accept: Callable[[Delta], bool], /) -> None: ...


@dataclass
class Usage:
    """Token counts of a request, over all its answers; stop tokens count too."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, other: "Usage") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


async def check(job: Job, service: Service) -> None:
    """Raises RequestError for a request that cannot be served, EngineDead when the engine is not running, ApiError if
    there is no room for its answers."""
    with named(job.names):
        service.engine.check(job.prompt_ids, job.params, **vars(job.options))
    await service.engine.reserve(job.params.n)


async def check_all(jobs: Sequence[Job], service: Service) -> None:
    """Check all jobs of one request. The event loop serves other requests in between."""
    for job in jobs:
        await check(job, service)
        await asyncio.sleep(0)


@dataclass(slots=True)
class _Answer:
    """The state of one answer. `in_reasoning`: its reasoning has not ended yet."""

    parser: OutputParser | None
    in_reasoning: bool
    has_called: bool = False


@dataclass(slots=True)
class _DeltaReader:
    """Converts the engine's deltas of a job into steps."""

    job: Job
    usage: Usage
    processed: bool = False
    answers: dict[int, _Answer] = field(default_factory=dict)
    has_cached_count: bool = False

    def events(self, delta: Delta) -> list[Event]:
        """The events of the next delta, whose tokens are counted."""
        answer = self.answers.get(delta.index) or self._new_answer(delta.index)
        self._count(delta, answer)
        events = self._events(delta, answer)
        if self.job.recording is not None:
            self.job.recording.add(delta, events)
        return events

    def step(self, delta: Delta, events: list[Event]) -> Step:
        """The step of a delta with these events."""
        answer = self.answers[delta.index]
        for event in events:
            if isinstance(event, ToolCallEnd):
                answer.has_called = True
        reason: str | None = delta.finish_reason
        return Step(
            index=delta.index,
            events=events,
            token_ids=delta.token_ids,
            logprobs=self._rows(delta.logprobs) if self.job.params.logprobs is not None else None,
            prompt_logprobs=self._rows(delta.prompt_logprobs),
            finish_reason="tool_calls" if reason == "stop" and answer.has_called else reason,
            stop_reason=delta.stop_reason,
            routed_experts=delta.routed_experts,
            sampling_mask=delta.sampling_mask,
            version=delta.version,
            num_steps=bool(delta.token_ids) if delta.arrivals is None else len(delta.arrivals),
        )

    def _rows(self, rows: Sequence[LogprobRow] | None) -> Sequence[LogprobRow] | None:
        return rows if rows is None or not self.processed else [_processed(row) for row in rows]

    def _new_answer(self, index: int) -> _Answer:
        reader = self.job.reader
        parser = None if reader is None else reader.parser()
        answer = self.answers[index] = _Answer(parser, in_reasoning=reader is not None and reader.reasoning)
        return answer

    def _events(self, delta: Delta, answer: _Answer) -> list[Event]:
        if answer.parser is None:
            text = delta.text
            return [ContentDelta(text)] if text else []
        feed = answer.parser.feed
        if len(delta.pieces) == 1 and delta.finish_reason is None:  # made short: most are like this
            return feed(*delta.pieces[0])
        events = [event for token_id, text in delta.pieces for event in feed(token_id, text)]
        return events + answer.parser.finish() if delta.finish_reason is not None else events

    def _count(self, delta: Delta, answer: _Answer) -> None:
        self.usage.completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None and not self.has_cached_count:
            # Reported by the first answer; the others share the prompt that it computed.
            self.usage.cached_tokens, self.has_cached_count = delta.num_cached_tokens, True
        if answer.in_reasoning:
            assert self.job.reader is not None
            tokenizer = self.job.reader.tokenizer
            ends = {tokenizer.id_of(THINK_END), tokenizer.id_of(CALL), *tokenizer.eos_ids}
            before_end = next((i for i, token_id in enumerate(delta.token_ids) if token_id in ends), None)
            answer.in_reasoning = before_end is None
            self.usage.reasoning_tokens += len(delta.token_ids) if before_end is None else before_end


def _processed(row: LogprobRow) -> LogprobRow:
    """With the values of the distribution that was sampled from in place of the model's own."""

    def value(found: Logprob) -> float:
        return found.logprob if found.tempered is None else max(found.tempered, LEAST_LOGPROB)

    return {token_id: found._replace(logprob=value(found)) for token_id, found in row.items()}


async def steps(job: Job, service: Service, usage: Usage, tap: Tap[Step] | None = None) -> AsyncGenerator[Step, None]:
    """Run a job; yields its steps as they arrive, and updates `usage`. Closing the generator aborts the request. `tap`
    gets the steps that it can send at once; these are not yielded.

    Raises RequestError if the engine refuses the request, EngineDead if it dies, ApiError `server_closing` if the
    server closes it. Logs one line for each request, without its text.
    """
    start, reason = time.monotonic(), "left"
    processed = service.processed_logprobs if job.processed is None else job.processed
    reading = _DeltaReader(job, usage, processed=processed)
    tenant = caller().name
    engine_id = service.running.enter(tenant, job.id)
    try:
        params, options = _asked(job)
        generation = service.engine.generate(
            job.prompt_ids, params, request_id=engine_id, streams=job.streams, **options
        )
        with named(job.names):
            async with generation as deltas:
                if tap is not None and isinstance(deltas, Divertible):
                    deltas.divert(partial(_send_now, tap, reading))
                async for delta in deltas:
                    if delta.finish_reason == "abort" and service.engine.stopped_because is not None:
                        raise _closing()
                    step = reading.step(delta, reading.events(delta))
                    reason = step.finish_reason or reason
                    yield step
    except EngineDead as error:
        reason = SERVER_CLOSING if service.state.is_closing else type(error).__name__
        if service.state.is_closing:
            raise _closing() from None
        raise
    except Exception as error:
        reason = (isinstance(error, ApiError) and error.code) or type(error).__name__
        raise
    finally:
        service.running.leave(tenant, job.id)
        seconds = time.monotonic() - start
        values = (job.id, usage.prompt_tokens, usage.completion_tokens, seconds, reason)
        logger.info("%s: %d prompt tokens, %d answer tokens, %.2f s, %s", *values)


def _asked(job: Job) -> tuple[SamplingParams, dict[str, Any]]:
    """Parameters and options for the engine. A session needs log-probabilities, and what each token was drawn from."""
    params, options = job.params, vars(job.options)
    if job.recording is None:
        return params, options
    params = job.recording.params(params)
    return params, {**options, "sampling_mask": params.truncates, **job.recording.options()}


def _send_now(tap: Tap[Step], reading: _DeltaReader, delta: Delta) -> bool:
    """Whether a delta could be sent at once. One that ends an answer is left to `steps`."""
    if delta.finish_reason is not None or not tap.is_open:
        return False
    events = reading.events(delta)
    only = events[0] if len(events) == 1 and delta.prompt_logprobs is None else None
    plain = tap.plain.get((delta.index, type(only)))
    if plain is not None and isinstance(only, (ContentDelta, ReasoningDelta)):
        tap.send_text(plain.filled(only.text))
    else:
        tap.send(reading.step(delta, events))
    return True


def _closing() -> ApiError:
    return ApiError(503, "the server is closing", code=SERVER_CLOSING, retry_after=1)


async def merged(sources: Sequence[AsyncGenerator[Step, None]]) -> AsyncGenerator[tuple[int, Step], None]:
    """Steps of several jobs as they arrive, each with the number of its job. An error in one ends all of them."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for step in only:
                yield 0, step
        return
    arrived: asyncio.Queue[tuple[int, Step | Exception | None]] = asyncio.Queue()

    async def pump(number: int, source: AsyncGenerator[Step, None]) -> None:
        try:
            async with aclosing(source):
                async for step in source:
                    arrived.put_nowait((number, step))
            arrived.put_nowait((number, None))
        except Exception as error:  # noqa: BLE001 - raised again in the consumer
            arrived.put_nowait((number, error))

    tasks = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    try:
        num_left = len(tasks)
        while num_left:
            number, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
