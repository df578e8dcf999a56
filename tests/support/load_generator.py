"""A second load generator, of threads and http.client, and `glm5 bench serve` beside it.

It shares nothing with the first: another HTTP, another parser, another clock, its own arithmetic. Both load the same
server at the same time, so that a busy machine disturbs both.
"""

import asyncio
import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from glm5.bench.serve.session import measure
from glm5.config.bench_serve import BenchServeConfig

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Size:
    """`clients` that each send `rounds` requests for `num_tokens` tokens."""

    clients: int
    rounds: int
    num_tokens: int


def ask(connection: http.client.HTTPConnection, model: str, num_tokens: int) -> tuple[float, float, int]:
    """(TTFT, E2E, tokens) of one request."""
    body = {"model": model, "prompt": "hello", "max_tokens": num_tokens, "stream": True, "temperature": 0}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    first = last = num = 0
    for line in answer:
        now = time.perf_counter()
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if chunk["choices"]:
            first, last = first or now, now
        num = (chunk.get("usage") or {}).get("completion_tokens", num)
    return first - start, last - start, num


def independent(url: str, model: str, size: Size) -> dict[str, float]:
    """The figures of as many threads as there are clients."""
    answers: list[tuple[float, float, int]] = []

    def client() -> None:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        answers.extend(ask(connection, model, size.num_tokens) for _ in range(size.rounds))
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(size.clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    assert len(answers) == size.clients * size.rounds
    return {
        "output_throughput": sum(num for _, _, num in answers) / seconds,
        "ttft": statistics.median(ttft for ttft, _, _ in answers) * 1000,
        "tpot": statistics.median((e2e - ttft) / (num - 1) for ttft, e2e, num in answers) * 1000,
        "e2el": statistics.median(e2e for _, e2e, _ in answers) * 1000,
    }


def ours(url: str, model: str, size: Size, begun: threading.Event | None = None) -> dict[str, float]:
    """The same figures by `glm5 bench serve`. `begun` is set when the run begins, after all preparations."""

    def started(_plan: object) -> Callable[..., None]:
        if begun is not None:
            begun.set()
        return lambda _outcome, _now: None

    given = {"base_url": url, "model": model, "max_concurrency": (size.clients,)}
    given |= {"num_prompts": size.clients * size.rounds, "random_input_len": 8, "random_output_len": size.num_tokens}
    settings = BenchServeConfig.model_validate(given)
    (done,) = asyncio.run(measure(settings, None, started, lambda _done: None))
    assert done.result.completed == size.clients * size.rounds
    times = {name: done.result.times[name].percentiles[50.0] for name in ("ttft", "tpot", "e2el")}
    return {"output_throughput": done.result.output_throughput, **times}


def measured_together(url: str, model: str, size: Size) -> tuple[dict[str, float], dict[str, float]]:
    """Ours and the other's, of the same time."""
    theirs: dict[str, float] = {}
    begun = threading.Event()

    def wait_and_measure() -> None:
        if begun.wait(PATIENCE_S):
            theirs.update(independent(url, model, size))

    other = threading.Thread(target=wait_and_measure)
    other.start()
    try:
        return ours(url, model, size, begun), theirs
    finally:
        other.join()


def apart(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest relative difference of a figure."""
    assert one.keys() == other.keys()
    return max(abs(one[name] / other[name] - 1) for name in one)
