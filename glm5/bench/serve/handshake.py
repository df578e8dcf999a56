"""Before the first run: wait for the server, get the model's name, and measure the tokens per word of prompts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from glm5.bench.serve.api_formats import DIALECTS, RequestParams
from glm5.bench.serve.client import Client
from glm5.bench.serve.failure import CONNECT, DISCONNECTED, TIMEOUT, RequestFailed
from glm5.bench.serve.http import Address, Pool
from glm5.bench.serve.record import Record
from glm5.bench.serve.texts import Ids, Source, Words
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import GlmError
from glm5.config.bench_serve import BenchServeConfig

logger = logging.getLogger(__name__)

PROBE_TOKENS = (32, 160)  # lengths of the two prompts that measure tokens per word
PROBE_SEED = 1 << 32  # larger than any number of clients, which seeds other prompts
RETRY_EVERY = 1.0  # seconds
NOT_READY = (CONNECT, DISCONNECTED, TIMEOUT, "http 502", "http 503", "http 504")
FLUSH_ROUTES = ("/flush_cache", "/reset_prefix_cache")


class ServerInfo(NamedTuple):
    """A server that answers, and the source of prompts for it."""

    client: Client
    model: str
    source: Source


async def probe_server(settings: BenchServeConfig, pool: Pool, address: Address, api_key: str | None) -> ServerInfo:
    """Wait until the server answers a request. Raises GlmError if it refuses one or times out."""
    headers = ({"Authorization": f"Bearer {api_key}"} if api_key else {}) | settings.headers

    def client_for(model: str) -> Client:
        extra: Mapping[str, Any] = settings.extra_body or {}
        asking = RequestParams(model, settings.temperature, settings.top_p, settings.ignore_eos, extra)
        dialect, timeout = DIALECTS[settings.backend](asking), settings.request_timeout
        return Client(pool, address, dialect, headers=headers, timeout=timeout, endpoint=settings.endpoint)

    deadline = asyncio.get_running_loop().time() + settings.ready_check_timeout_sec
    model = settings.model or await _until_ready(lambda: _first_model(client_for("")), settings.url, deadline)
    client, source = client_for(model), _known_source(settings)
    short = await _until_ready(lambda: _probe(client, source, 0), settings.url, deadline)
    if source is not None:
        return ServerInfo(client, model, source)
    long = await _until_ready(lambda: _probe(client, source, 1), settings.url, deadline)
    if short is None or long is None:
        logger.warning("the server does not count prompt tokens: a word is taken for one")
        return ServerInfo(client, model, Words())
    return ServerInfo(client, model, Words.measured(PROBE_TOKENS, (short, long)))


async def flush_cache(client: Client) -> None:
    """Empty the server's prefix cache. Raises GlmError if no route for it works."""
    failures: list[str] = []
    for route in FLUSH_ROUTES:
        try:
            await client.fetch("POST", route)
            return
        except RequestFailed as error:
            failures.append(f"{route}: {error}")
    raise GlmError(f"--flush-cache: {'; '.join(failures)}")


def token_counter(folder: str) -> Callable[[str], int]:
    """A function that counts the tokens of a text with the tokenizer in `folder`."""
    tokenizer = Tokenizer.from_dir(folder)
    return lambda text: len(tokenizer.encode(text))


def _known_source(settings: BenchServeConfig) -> Source | None:
    """The source of random prompts if it does not depend on the server, else None."""
    if settings.vocab_size is not None:
        return Ids(settings.vocab_size)
    if settings.tokenizer is not None:
        return Words.of_tokenizer(token_counter(settings.tokenizer))
    return None


async def _until_ready(attempt: Callable[[], Awaitable[Any]], url: str, deadline: float) -> Any:
    waiting = False
    while True:
        try:
            return await attempt()
        except RequestFailed as error:
            if error.kind not in NOT_READY or asyncio.get_running_loop().time() >= deadline:
                hint = "; --no-ignore-eos leaves that parameter out" if "ignore_eos" in error.message else ""
                raise GlmError(f"{url}: the first request failed: {error}{hint}") from None
            if not waiting:
                logger.info("waiting for %s: %s", url, error)
            waiting = True
            await asyncio.sleep(RETRY_EVERY)


async def _first_model(client: Client) -> str:
    try:
        listed: Any = msgspec.json.decode(await client.fetch("GET", "/v1/models"))
        return str(listed["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise GlmError("/v1/models lists no model; give --model") from None


async def _probe(client: Client, source: Source | None, number: int) -> int | None:
    """The prompt tokens that the server reports for a test request. Raises `RequestFailed`."""
    record = Record()
    rng = np.random.default_rng([PROBE_SEED, number])
    await client.ask(record, (source or Words()).draw(rng, PROBE_TOKENS[number]), 1)
    if record.error is not None:
        raise RequestFailed(record.error, record.message)
    return record.usage.prompt_tokens
