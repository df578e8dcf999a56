"""`glm5 bench serve`: contacts the server, runs each number of clients in turn, reports each result."""

import asyncio
import dataclasses
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from glm5.bench.serve.arrivals import arrival_times, read_arrivals
from glm5.bench.serve.client import Client
from glm5.bench.serve.counters import Deltas, deltas, read_counters, sglang_acceptance
from glm5.bench.serve.files import Reader
from glm5.bench.serve.handshake import ServerInfo, flush_cache, probe_server, token_counter
from glm5.bench.serve.http import Address, Open, Pool, opener
from glm5.bench.serve.load import Outcome, Plan, Report, run
from glm5.bench.serve.statistics import Result, summarize
from glm5.bench.serve.texts import Source, Words
from glm5.bench.serve.workload import Conversation, generate
from glm5.common import open_files
from glm5.common.errors import ConfigError
from glm5.config.bench_serve import MAX_OPEN, REQUESTS_A_CLIENT, BenchServeConfig

logger = logging.getLogger(__name__)

WARMUP_SEED = 1 << 33  # added to the seed, so that warm-up prompts differ from those of the run


class RunInfo(NamedTuple):
    """EngineInfo from before the first run. `server`: its Server header. Token counts: see `glm5.bench.serve.texts`."""

    model: str
    server: str
    template_tokens: int
    tokens_per_word: float | None


class Done(NamedTuple):
    """A finished run: its records and its statistics."""

    info: RunInfo
    outcome: Outcome
    result: Result


Started = Callable[[Plan], Report]
"""Called before a run; returns the receiver of its progress."""
Connect = Callable[[Address], Awaitable[Open]]


async def measure(
    settings: BenchServeConfig,
    api_key: str | None,
    started: Started,
    ended: Callable[[Done], None],
    connect: Connect | None = None,
) -> list[Done]:
    """Run every number of clients in `settings`; `ended` is called with each result. If cancelled, the last run is
    partial. `connect` replaces how connections are opened.

    Raises ConfigError for unusable files, GlmError for a server that does not answer or refuses the first request.
    """
    open_files.allow_many()
    address = Address.of(settings.url)
    given = None if settings.arrival_times is None else read_arrivals(settings.arrival_times)
    open_connection = await (connect(address) if connect else opener(address, verify=not settings.insecure))
    runs: list[Done] = []
    async with _closing(Pool(open_connection)) as pool:
        server = await probe_server(settings, pool, address, api_key)
        rows = _read_file(settings, server)
        used = 0
        for clients in settings.max_concurrency or (None,):
            num = _num_requests(settings, clients, len(rows), len(given or ()))
            conversations = _conversations_for(settings, server.source, rows, num, clients, used)
            used += len(conversations)
            runs.append(await _run(settings, server, _plan(settings, conversations, given, clients), started))
            ended(runs[-1])
            if runs[-1].result.partial:
                break
    return runs


@asynccontextmanager
async def _closing(pool: Pool) -> AsyncGenerator[Pool, None]:
    try:
        yield pool
    finally:
        pool.close()


async def _run(settings: BenchServeConfig, server: ServerInfo, plan: Plan, started: Started) -> Done:
    await _warm_up(settings, server.client, server.source, plan.clients)
    if settings.flush_cache:
        await flush_cache(server.client)
    before = await read_counters(server.client)
    outcome = await run(server.client, plan, started(plan))
    found = await _deltas(settings, server.client, before)
    result = summarize(outcome, settings.limits, settings.metric_percentiles, found)
    mean = server.source.mean if isinstance(server.source, Words) else None
    return Done(RunInfo(server.model, server.client.server, server.source.overhead, mean), outcome, result)


async def _deltas(settings: BenchServeConfig, client: Client, before: dict[tuple[str, str], float] | None) -> Deltas:
    found = deltas(before, await read_counters(client))
    if settings.backend == "sglang" and found.acceptance_length is None:
        return dataclasses.replace(found, acceptance_length=await sglang_acceptance(client))
    return found


async def _warm_up(settings: BenchServeConfig, client: Client, source: Source, clients: int | None) -> None:
    if not settings.num_warmups:
        return
    changes: dict[str, object] = {"seed": settings.seed + WARMUP_SEED}
    if settings.dataset_name == "file":
        changes["dataset_name"] = "random"
    warm = generate(settings.model_copy(update=changes), source, settings.num_warmups, clients or 0)
    if (await run(client, Plan(warm, [0.0] * len(warm), clients))).partial:
        raise asyncio.CancelledError


def _read_file(settings: BenchServeConfig, server: ServerInfo) -> list[Conversation]:
    if settings.dataset_path is None:
        return []
    if not Path(settings.dataset_path).is_file():
        raise ConfigError(f"--dataset-path: there is no file {settings.dataset_path}")
    count = token_counter(settings.tokenizer) if settings.tokenizer is not None else lambda text: len(text) // 4
    rows = Reader(server.source, count, settings.seed, settings.output_len).read(settings.dataset_path)
    for row in rows:
        server.client.check(row.turns[0].content)
    return rows


def _num_requests(settings: BenchServeConfig, clients: int | None, num_rows: int, num_times: int) -> int:
    """Requests of a run: by the settings, else by arrival times and lines of the file, else by the number of
    clients."""
    if settings.num_prompts is not None:
        return settings.num_prompts
    turns = settings.multi_turn_num_turns if settings.dataset_name == "multi-turn" else 1
    if num_times:
        return min(num_times, num_rows or num_times) * turns
    if clients is None:
        return num_rows or MAX_OPEN
    return clients * turns * math.ceil(REQUESTS_A_CLIENT / turns)  # the same number of conversations for every client


def _conversations_for(
    settings: BenchServeConfig, source: Source, rows: Sequence[Conversation], num: int, clients: int | None, used: int
) -> list[Conversation]:
    """The conversations of a run. A file is read in order, from where the previous run ended."""
    if not rows:
        return generate(settings, source, num, clients or 0)
    if used + num > len(rows):
        logger.warning("the file's %d lines are sent more than once: prefix caches will know them", len(rows))
    return [rows[(used + k) % len(rows)] for k in range(num)]


def _plan(
    settings: BenchServeConfig, conversations: Sequence[Conversation], given: list[float] | None, clients: int | None
) -> Plan:
    num = len(conversations)
    if given is not None and len(given) < num:
        raise ConfigError(f"--arrival-times has {len(given)} times for {num} conversations; lower --num-prompts")
    # The request rate counts turns, so conversations of several turns start less often.
    rate = settings.request_rate * num / sum(len(conversation.turns) for conversation in conversations)
    times = given[:num] if given is not None else arrival_times(num, rate, settings.burstiness, settings.seed)
    return Plan(conversations, times, clients, settings.multi_turn_pause)
