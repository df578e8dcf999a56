"""A second load generator, of threads and http.client, measures the same run, and both agree.

It shares nothing with the first: another HTTP, another parser, another clock, its own arithmetic. Both load the same
server at the same time, so that a busy machine disturbs both. Their times are the server's script and what the machine
adds to it, so medians are compared, and a run that something disturbed is repeated.
"""

import asyncio
import http.client
import json
import statistics
import threading
import time

import pytest

from glm5.bench.serve.session import measure
from glm5.config.bench_serve import BenchServeConfig
from tests.support.scripted_server import Script, completion, plain, serving

TTFT, GAP, NUM_TOKENS = 0.2, 0.02, 16
CLIENTS, ROUNDS = 4, 3
TOLERANCE, ATTEMPTS = 0.05, 5


def handler(request):
    if request.path != "/v1/completions":
        return plain({}, status=404)
    if request.json["max_tokens"] == 1:
        return completion(0.0, [])
    return completion(TTFT, [GAP] * (NUM_TOKENS - 1))


def ask(connection: http.client.HTTPConnection) -> tuple[float, float, int]:
    """(TTFT, E2E, tokens) of one request."""
    body = {"model": "m", "prompt": "hello", "max_tokens": NUM_TOKENS, "stream": True}
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    first = last = num_tokens = 0
    for line in answer:
        now = time.perf_counter()
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if chunk["choices"]:
            first, last = first or now, now
        num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    return first - start, last - start, num_tokens


def independent(url: str) -> dict[str, float]:
    """The figures of CLIENTS threads that each send ROUNDS requests."""
    answers = []

    def client():
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        answers.extend(ask(connection) for _ in range(ROUNDS))
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    return {
        "output_throughput": sum(num for _, _, num in answers) / seconds,
        "ttft": statistics.median(ttft for ttft, _, _ in answers) * 1000,
        "tpot": statistics.median((e2e - ttft) / (num - 1) for ttft, e2e, num in answers) * 1000,
        "e2el": statistics.median(e2e for _, e2e, _ in answers) * 1000,
    }


def ours(url: str) -> dict[str, float]:
    given = {"base_url": url, "model": "m", "max_concurrency": (CLIENTS,), "num_prompts": CLIENTS * ROUNDS}
    settings = BenchServeConfig.model_validate(given | {"random_input_len": 8, "random_output_len": NUM_TOKENS})
    (done,) = asyncio.run(measure(settings, None, lambda _plan: lambda _outcome, _now: None, lambda _done: None))
    assert done.result.completed == CLIENTS * ROUNDS
    times = {name: done.result.times[name].percentiles[50.0] for name in ("ttft", "tpot", "e2el")}
    return {"output_throughput": done.result.output_throughput, **times}


def measured_together(url: str) -> tuple[dict[str, float], dict[str, float]]:
    theirs: dict[str, float] = {}
    other = threading.Thread(target=lambda: theirs.update(independent(url)))
    other.start()
    try:
        return ours(url), theirs
    finally:
        other.join()


def apart(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest relative difference of a figure."""
    assert one.keys() == other.keys()
    return max(abs(one[name] / other[name] - 1) for name in one)


def test_two_load_generators_agree():
    with serving(handler) as url:
        for _ in range(ATTEMPTS):
            one, other = measured_together(url)
            print(one, other)
            if apart(one, other) < TOLERANCE:
                break
    assert apart(one, other) < TOLERANCE
    assert one["ttft"] == pytest.approx(TTFT * 1000, rel=0.2)  # and both see the script


def test_the_comparison_notices():
    figures = {"output_throughput": 64.0, "ttft": 200.0}
    assert apart(figures, figures | {"ttft": 212.0}) > TOLERANCE
    assert apart(figures, figures | {"output_throughput": 60.0}) > TOLERANCE


def test_a_server_that_refuses_is_told_over_sockets_too():
    with serving(lambda _: Script([(0.0, b'{"error": {"message": "no"}}')], status=400)) as url, \
            pytest.raises(Exception, match="http 400: no"):  # fmt: skip
        ours(url)
