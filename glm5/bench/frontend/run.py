"""Starts the server over the scripted engine, sends it requests, and says what they cost it."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from glm5.bench.frontend.clients import Found, run
from glm5.bench.frontend.scripted_engine import STEP_RATE
from glm5.checkpoint.init import write_weightless
from glm5.common.atomic import atomic_write
from glm5.common.errors import GlmError
from glm5.config.bench_frontend import BenchFrontendConfig
from glm5.config.presets import preset

_PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_WARM_UP = 8  # tokens of the answers before those that count


def measure(settings: BenchFrontendConfig, server: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The results, as for --json. `server`: the program of its process, which runs in this environment. Raises GlmError
    if it does not start, or a request fails."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_weightless(preset("tiny"), Path(folder) / "tiny", fp8=False)
        with atomic_write(model / STEP_RATE) as file:
            file.write(str(settings.step_rate or 0))
        # -P: the program's own folder is not searched for modules, since names in it are those of the standard library.
        with _running([sys.executable, "-P", str(server), _flags(settings, model)], environment) as process:
            url = urlsplit(_line(process.stdout))
            return drive(settings, url.hostname or "", url.port or 0, partial(_processor_time, process))


def drive(settings: BenchFrontendConfig, host: str, port: int, processor_time: Callable[[], float]) -> dict[str, Any]:
    """The results of a server that runs. `processor_time`: seconds that it has used. Raises GlmError if a request
    fails."""
    clients = settings.max_concurrency

    def ask(count: int, max_tokens: int) -> tuple[Found, float]:
        requests = [_request(settings, number, max_tokens) for number in range(count)]
        before = processor_time()
        found = run(host, port, requests, clients)
        return found, processor_time() - before

    ask(clients, _WARM_UP)
    found, cpu_s = ask(settings.num_prompts or 2 * clients, settings.random_output_len)
    return _result(settings, found, cpu_s)


def _flags(settings: BenchFrontendConfig, model: Path) -> str:
    """Settings of `glm5 serve`. Other versions do not know --stream-interval."""
    given: dict[str, Any] = {"model": str(model), "max_num_seqs": settings.max_concurrency, "max_model_len": 1 << 16}
    if settings.stream_interval > 1:
        given["stream_interval"] = settings.stream_interval
    return json.dumps(given)


@contextmanager
def _running(command: list[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends when its standard input does."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=dict(environment)) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    line = stream.readline().strip()
    if not line:
        raise GlmError("the server has ended; what it said is above")
    return line


def _processor_time(process: subprocess.Popen[str]) -> float:
    """Seconds that all threads of the server have used."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(_line(process.stdout))


def _request(settings: BenchFrontendConfig, number: int, max_tokens: int) -> bytes:
    words = "".join(chr(97 + (number + at) % 26) for at in range(settings.random_input_len))
    body: dict[str, Any] = {"stream": True, "max_tokens": max_tokens, "ignore_eos": True}
    if settings.backend == "openai-chat":
        body |= {"messages": [{"role": "user", "content": words}], "chat_template_kwargs": {"enable_thinking": False}}
    else:
        body["prompt"] = words
    data = json.dumps(body).encode()
    head = f"POST {_PATHS[settings.backend]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _result(settings: BenchFrontendConfig, found: Found, cpu_s: float) -> dict[str, Any]:
    num_tokens = found.num_requests * settings.random_output_len
    return {
        "settings": settings.model_dump(mode="json", by_alias=True),
        "requests": found.num_requests,
        "tokens": num_tokens,
        "chunks": found.num_events,
        "seconds": found.seconds,
        "server_cpu_s": cpu_s,
        "chunks_per_core_s": found.num_events / cpu_s,
        "tokens_per_core_s": num_tokens / cpu_s,
        "tokens_per_s": num_tokens / found.seconds,
        "tokens_per_chunk": num_tokens / found.num_events,
        "us_per_chunk": cpu_s / found.num_events * 1e6,
        "ttft_ms": _percentiles(found.first),
        "between_chunks_ms": _percentiles(found.gaps),
        "clients_chunks_per_core_s": found.num_events / found.busy_s,
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return dict.fromkeys(("p50", "p99"), seconds[0] * 1e3 if seconds else 0.0)
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3}


def table(result: dict[str, Any]) -> str:
    """The results as lines."""
    ttft, between = result["ttft_ms"], result["between_chunks_ms"]
    rows = [
        ("requests", f"{result['requests']}, {result['tokens']} tokens in {result['chunks']} chunks"),
        ("seconds", f"{result['seconds']:.2f}, of the server's processes' time {result['server_cpu_s']:.2f}"),
        ("chunks/s per core", f"{result['chunks_per_core_s']:,.0f}: {result['us_per_chunk']:.1f} us of each"),
        ("tokens/s per core", f"{result['tokens_per_core_s']:,.0f}"),
        ("tokens/s", f"{result['tokens_per_s']:,.0f}"),
        ("tokens a chunk", f"{result['tokens_per_chunk']:.2f}"),
        ("TTFT, ms", f"median {ttft['p50']:.1f}, p99 {ttft['p99']:.1f}"),
        ("between chunks, ms", f"median {between['p50']:.2f}, p99 {between['p99']:.2f}"),
        ("clients' ceiling", f"{result['clients_chunks_per_core_s']:,.0f} chunks/s per core"),
    ]
    return "\n".join(f"{name:20} {value}" for name, value in rows)
