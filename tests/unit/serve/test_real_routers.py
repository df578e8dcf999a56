"""Real routers in front of two servers of models/mini: prefixes are found, a drained server loses nothing, nor a dead.

Needs the programs `smg` and `vllm-router` (PyPI) in the folder GLM5_ROUTERS, or on the PATH; skipped without them.
"""

import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.long

REPO = Path(__file__).parents[3]
SECONDS = 180  # an upper limit for starts and answers on a busy machine
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
SERVE = [
    *(sys.executable, "-m", "glm5", "serve", str(REPO / "models/mini"), "--served-model-name", "mini", "--port", "0"),
    *("--kv-events-config", json.dumps(EVENTS)),
]


class Program:
    """A process whose lines are kept; ended by its own handle."""

    def __init__(self, command: list[str], folder: Path):
        self.lines: list[str] = []
        self._arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._arrived.put(line)
        self._arrived.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first new line that has this. AssertionError if the program ends before."""
        while (line := self._arrived.get(timeout=SECONDS)) is not None:
            if found := re.search(pattern, line):
                return found
        raise AssertionError("".join(self.lines[-40:]))

    def end(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Worker(Program):
    """A server of glm5."""

    def __init__(self, folder: Path):
        super().__init__(SERVE, folder)
        self.url = ""

    def wait_until_ready(self) -> None:
        self.url = self.wait_for(r"listening on (http://\S+)")[1]
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)

    def source(self) -> dict:
        (source,) = self.http.get("/kv_event_sources").json()
        return source

    def num_answered(self) -> int:
        text = self.http.get("/metrics").text
        return sum(int(float(n)) for n in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.MULTILINE))

    def end(self) -> None:
        if self.url:
            self.http.close()
        super().end()


@contextmanager
def workers(folder: Path) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        started = [Worker(folder) for _ in range(2)]
        for worker in started:
            stack.callback(worker.end)
        for worker in started:
            worker.wait_until_ready()
        yield started


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two servers that no test ends."""
    with workers(tmp_path_factory.mktemp("pair")) as started:
        yield started


def find(name: str) -> str:
    """The router's program; skips the test without it."""
    folder = os.environ.get("GLM5_ROUTERS")
    path = shutil.which(name, path=folder)
    if path is None:
        pytest.skip(f"needs the program {name} in the folder GLM5_ROUTERS or on the PATH: pip install {name}")
    return path


@contextmanager
def router(name: str, policy: str, behind: list[Worker], folder: Path, *more: str) -> Iterator[httpx.Client]:
    """A client of a router in front of these servers."""
    command = [find(name), *(["launch"] if name == "smg" else [])]
    ports = free_ports(2)
    command += ["--host", "127.0.0.1", "--port", str(ports[0]), "--prometheus-port", str(ports[1]), "--policy", policy]
    command += ["--worker-urls", *(worker.url for worker in behind), "--health-check-interval-secs", "1", *more]
    program = Program(command, folder)
    retrying = httpx.HTTPTransport(retries=12)
    try:
        program.wait_for(READY[name])
        with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=SECONDS, transport=retrying) as client:
            yield client
    except BaseException:
        print("".join(program.lines[-60:]))
        raise
    finally:
        program.end()


READY = {"vllm-router": "Starting server on", "smg": "Starting server on|Router ready|listening"}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def complete(http: httpx.Client, prompt: str, max_tokens: int = 2) -> int:
    """How many tokens of the prompt were found in the cache of the server that answered."""
    body = {"model": "mini", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def prompts(rng, count: int) -> list[str]:
    """Texts of about 300 tokens with nothing in common."""
    words = ["river", "stone", "window", "garden", "number", "letter", "winter", "bottle"]
    return [f"{rng.randrange(10**9)} " + " ".join(rng.choices(words, k=150)) for _ in range(count)]


@pytest.mark.parametrize("name", ["smg", "vllm-router"])
def test_a_prefix_goes_to_the_server_that_has_it(name, pair, rng, tmp_path):
    find(name)
    before = [worker.num_answered() for worker in pair]
    texts = prompts(rng, 8)
    # Routers spread what nobody has yet only when one server is busier than the other.
    eager = ["--balance-abs-threshold", "1", "--balance-rel-threshold", "1.01"]
    with router(name, "cache_aware", pair, tmp_path, *eager) as http, ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda text: complete(http, text, 40), texts)) == {0}
        for _ in range(2):
            assert all(complete(http, text) >= 128 for text in texts)
        assert http.get("/v1/models").json()["data"][0]["id"] == "mini"
    after = [worker.num_answered() for worker in pair]
    assert sum(after) - sum(before) == 24
    assert all(now > then for now, then in zip(after, before, strict=True)), "one server got everything"


def event_flags(behind: list[Worker]) -> list[str]:
    flags = ["--kv-event-block-size", "64", "--kv-event-model", "mini", "--log-level", "debug"]
    for worker in behind:
        source = worker.source()
        flags += ["--kv-event-source", f"{worker.url}={source['endpoint']}"]
        flags += ["--kv-event-replay-source", f"{worker.url}={source['replay_endpoint']}"]
    return flags


def test_a_router_learns_from_events(pair, rng, tmp_path):
    """Prompts that a server got past the router are found there; also those from before the router's start."""
    find("vllm-router")
    early, late = prompts(rng, 4), prompts(rng, 4)
    for number, text in enumerate(early):
        complete(pair[number % 2].http, text)
    with router("vllm-router", "kv_aware", pair, tmp_path, *event_flags(pair)) as http:
        for number, text in enumerate(late):
            complete(pair[number % 2].http, text)
        found = [complete(http, text) for text in late]
        assert all(count >= 128 for count in found), found
        print("cached tokens of prompts from before the router's start:", [complete(http, text) for text in early])


@pytest.mark.parametrize("name", ["smg", "vllm-router"])
@pytest.mark.parametrize("how", ["drained", "killed"])
def test_a_server_that_goes_loses_nothing_that_had_not_begun(name, how, rng, tmp_path):
    find(name)
    with workers(tmp_path) as started, router(name, "round_robin", started, tmp_path) as http:
        for text in prompts(rng, 4):
            complete(http, text)
        going = started[0]
        with ThreadPoolExecutor(8) as pool:
            if how == "drained":
                running = [pool.submit(complete, http, text, 300) for text in prompts(rng, 4)]
                wait_until_busy(started)
                going.process.send_signal(signal.SIGTERM)
            else:
                running = []
                going.process.kill()
                going.process.wait(SECONDS)
            later = [pool.submit(complete, http, text) for text in prompts(rng, 24)]
            for done in [*running, *later]:
                done.result(SECONDS)
        if how == "drained":
            assert going.process.wait(SECONDS) == 0
        assert started[1].num_answered() >= 12


def wait_until_busy(behind: list[Worker]) -> None:
    """Until both servers compute an answer."""
    for worker in behind:
        while worker.http.get("/load").json()["server_load"] < 1:
            continue
