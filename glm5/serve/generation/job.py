"""The one path from a request to its answers, whatever API it came through.

    job = Job(id, prompt_ids, params, options, reader)
    check(job, service)                                # every refusal that can be known before the status line is sent
    async for step in steps(job, service, usage): ...  # leaving it aborts the request

An API reads its body into a job and writes steps as its own answer; nothing else of it touches the engine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from glm5.chat.events import ContentDelta, Event, ToolCallEnd
from glm5.chat.parser import CALL, THINK_END, Functions, OutputParser
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import EngineDead
from glm5.engine.frontend.outputs import Delta, Logprob
from glm5.engine.frontend.request_builder import Options
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import RoutedExperts
from glm5.serve.http.call import caller
from glm5.serve.http.errors import ApiError, named
from glm5.serve.service.service import Service

logger = logging.getLogger(__name__)

SERVER_CLOSING = "server_closing"

LogprobRow = dict[int, Logprob]  # the token itself first, then the likeliest


@dataclass(frozen=True)
class Reader:
    """How an answer is read: `reasoning` says whether it begins inside reasoning, `parse_tools` whether calls of
    `functions` are looked for."""

    tokenizer: Tokenizer
    functions: Functions | None = None
    reasoning: bool = False
    parse_tools: bool = False

    def parser(self) -> OutputParser:
        """For one answer."""
        return OutputParser(self.tokenizer, self.functions, reasoning=self.reasoning, parse_tools=self.parse_tools)


@dataclass(frozen=True)
class Job:
    """A request, ready for the engine. `id`: what its caller may call it. `reader` None: the answer is plain text.
    `names`: what the API calls parameters, where that is not what `SamplingParams` does.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    options: Options = field(default_factory=Options)
    reader: Reader | None = None
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What one step added to answer `index`; joined steps are the answer.

    `token_ids` are all new tokens, the one that ended the answer included. `logprobs`: a row for each of them, if asked
    for. `prompt_logprobs`: on one step of the request, of the prompt's tokens but the first. `finish_reason` is on the
    last step of each index: "stop", "length", "tool_calls", or "abort" where somebody else ended it. `version`: of the
    weights.
    """

    index: int
    events: Sequence[Event]
    token_ids: Sequence[int]
    logprobs: Sequence[LogprobRow] | None = None
    prompt_logprobs: Sequence[LogprobRow] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    routed_experts: RoutedExperts | None = None
    version: int = 0

    @property
    def text(self) -> str:
        """Of the answer proper: no reasoning, no calls."""
        return "".join([event.text for event in self.events if isinstance(event, ContentDelta)])


@dataclass
class Usage:
    """Tokens of a request, all its answers together; those that ended an answer count too."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, other: "Usage") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def check(job: Job, service: Service) -> None:
    """RequestError for a request that cannot be served, EngineDead when the engine is not running."""
    with named(job.names):
        service.engine.check(job.prompt_ids, job.params, **vars(job.options))


async def check_all(jobs: Sequence[Job], service: Service) -> None:
    """The same for the jobs of one request; others are served between them."""
    for job in jobs:
        check(job, service)
        await asyncio.sleep(0)


@dataclass
class _Answer:
    """One answer being read. `reasons`: its tokens are still reasoning."""

    parser: OutputParser | None
    reasons: bool
    has_called: bool = False


@dataclass
class _Reading:
    """All answers of a job."""

    job: Job
    usage: Usage
    answers: dict[int, _Answer] = field(default_factory=dict)
    knows_cached: bool = False

    def step(self, delta: Delta) -> Step:
        answer = self._answer(delta.index)
        self._count(delta, answer)
        events = self._events(delta, answer)
        answer.has_called = answer.has_called or any(isinstance(event, ToolCallEnd) for event in events)
        reason: str | None = delta.finish_reason
        return Step(
            index=delta.index,
            events=events,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs if self.job.params.logprobs is not None else None,
            prompt_logprobs=delta.prompt_logprobs,
            finish_reason="tool_calls" if reason == "stop" and answer.has_called else reason,
            stop_reason=delta.stop_reason,
            routed_experts=delta.routed_experts,
            version=delta.version,
        )

    def _answer(self, index: int) -> _Answer:
        if index not in self.answers:
            reader = self.job.reader
            parser = None if reader is None else reader.parser()
            self.answers[index] = _Answer(parser, reasons=reader is not None and reader.reasoning)
        return self.answers[index]

    def _events(self, delta: Delta, answer: _Answer) -> list[Event]:
        if answer.parser is None:
            text = delta.text
            return [ContentDelta(text)] if text else []
        events = [event for piece in delta.pieces for event in answer.parser.feed(piece.token_id, piece.text)]
        return events + answer.parser.finish() if delta.finish_reason is not None else events

    def _count(self, delta: Delta, answer: _Answer) -> None:
        self.usage.completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None and not self.knows_cached:
            # The first answer found this much; the others share the prompt that it computed.
            self.usage.cached_tokens, self.knows_cached = delta.num_cached_tokens, True
        if answer.reasons:
            assert self.job.reader is not None
            tokenizer = self.job.reader.tokenizer
            ends = {tokenizer.id_of(THINK_END), tokenizer.id_of(CALL), *tokenizer.eos_ids}
            before_end = next((i for i, token_id in enumerate(delta.token_ids) if token_id in ends), None)
            answer.reasons = before_end is None
            self.usage.reasoning_tokens += len(delta.token_ids) if before_end is None else before_end


async def steps(job: Job, service: Service, usage: Usage) -> AsyncGenerator[Step, None]:
    """The answers, as they come; `usage` grows along. Closing the generator aborts the request.

    Raises RequestError for what the engine refuses, EngineDead when it dies, ApiError `server_closing` when it is
    ended with the server. One line in the log for each request, with nothing of its text.
    """
    start, reason = time.monotonic(), "left"
    reading = _Reading(job, usage)
    tenant = caller().name
    engine_id = service.running.enter(tenant, job.id)
    try:
        asked = service.engine.generate(job.prompt_ids, job.params, request_id=engine_id, **vars(job.options))
        with named(job.names):
            async with asked as deltas:
                async for delta in deltas:
                    if delta.finish_reason == "abort" and service.engine.stopped_because is not None:
                        raise _closing()
                    step = reading.step(delta)
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
        figures = (job.id, usage.prompt_tokens, usage.completion_tokens, seconds, reason)
        logger.info("%s: %d prompt tokens, %d answer tokens, %.2f s, %s", *figures)


def _closing() -> ApiError:
    return ApiError(503, "the server is closing", code=SERVER_CLOSING, retry_after=1)


async def merged(sources: Sequence[AsyncGenerator[Step, None]]) -> AsyncGenerator[tuple[int, Step], None]:
    """Steps of several requests as they come, each with the number of its source. What ends one ends all of them."""
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
        except Exception as error:  # noqa: BLE001 - it is raised where the steps are read
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
