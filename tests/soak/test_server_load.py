"""500 streaming clients at once, of which a tenth leave half-way and a tenth read slowly: every other answer is whole
and right, memory stays flat, and nothing is left behind. Also 2,000 of them, of two front ends, for ten minutes.

    SOAK_SECONDS=600 .venv/bin/python -m pytest -s tests/soak/test_server_load.py       ten minutes of the first
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict

import httpx
import psutil
import pytest

from glm5.config.serve import ServeConfig
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.serve.coordination.front_ends import FrontEnds
from glm5.serve.http.server import bind, serving
from glm5.serve.service.state import ServerState
from tests.support.engines import save_tiny
from tests.support.serving import make_app
from tests.support.streaming_crowd import MAX_COMPLAINTS, PATIENCE_S, Crowd, CrowdReport, Load, body_of, events_of

SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))
LONG_SECONDS, MANY_CLIENTS = float(os.environ.get("SOAK_SECONDS", "600")), 2000
NUM_CLIENTS, MAX_NUM_SEQS, NUM_QUESTIONS, MAX_TOKENS = 500, 64, 40, 32
NUM_PAGES = 100  # fewer than the running requests may need: some are preempted, most prefixes are forgotten
SAMPLE_S = 1.0
WARM_UP = 0.4  # of the samples: until then, memory is taken for the first time
FLAT = 1.03  # most of the last samples' median, in that of the first after the warm-up
SLACK_BYTES = 4 << 20


class Server:
    """What the test looks at while the application runs."""

    def __init__(self, folder):
        self.llm = LLM(
            save_tiny(folder, 11),
            max_model_len=256,
            max_num_seqs=MAX_NUM_SEQS,
            num_gpu_blocks_override=NUM_PAGES,
            deterministic=True,
        )
        self.engine, self.state = AsyncEngine(self.llm), ServerState()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.app = make_app(
            self.engine, state=self.state, max_num_seqs=MAX_NUM_SEQS, max_queue=NUM_CLIENTS, client_timeout=PATIENCE_S
        )
        self.service = self.app.state.service

    async def __call__(self, scope, receive, send):
        self.loop = asyncio.get_running_loop()
        await self.app(scope, receive, send)

    def processes(self) -> dict[str, psutil.Process]:
        return {"server": psutil.Process(), "engine": psutil.Process(self.llm.client.link.pid)}

    def num_tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return self.ask(count())

    def ask(self, coroutine):
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def assert_nothing_left(self, num_tasks: int, num_files: int) -> None:
        """No request, task, connection, place or page. What was closed just now may take a moment to be gone."""
        assert self.state.wait_until_idle(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while self.num_tasks() > num_tasks or psutil.Process().num_fds() > num_files or self.stats()["decoding"]:
            assert time.monotonic() < deadline, (self.num_tasks(), psutil.Process().num_fds(), self.stats())
        stats = self.stats()
        assert (stats["prompting"], stats["decoding"], stats["waiting"], stats["pages"]["in_use"]) == (0, 0, 0, 0)
        assert self.llm.client.num_unfinished == 0
        assert not self.engine._requests
        assert not self.service.running._names
        assert self.service.engine.admission.limits.num_places == 0

    def stats(self) -> dict:
        return self.ask(self.engine.stats())


def answers_alone(url: str) -> list[str]:
    """The text of each answer, asked for one by one."""
    texts = []
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        for question in range(NUM_QUESTIONS):
            answer = http.post("/v1/completions", json=body_of(question, MAX_TOKENS))
            assert answer.status_code == 200, answer.text
            _, events = events_of(b"HTTP/1.1 200 OK\r\n\r\n" + answer.content)
            texts.append("".join(c["text"] for event in events[:-1] for c in json.loads(event)["choices"]))
    assert len(set(texts)) == NUM_QUESTIONS
    return texts


def loaded(load: Load, processes: dict[str, psutil.Process]) -> tuple[CrowdReport, dict[str, list[int]]]:
    """What the clients tell, and the memory of each process (RSS) meanwhile."""
    command = [sys.executable, "-m", "tests.support.streaming_crowd"]
    memory: dict[str, list[int]] = {name: [] for name in processes}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        try:
            clients.stdin.write(json.dumps(asdict(load)))
            clients.stdin.close()
            deadline = time.monotonic() + load.seconds + 2 * PATIENCE_S
            while clients.poll() is None:
                assert time.monotonic() < deadline, "the clients do not end"
                for name, process in processes.items():
                    memory[name].append(process.memory_info().rss)
                try:
                    clients.wait(SAMPLE_S)
                except subprocess.TimeoutExpired:
                    continue
            assert clients.returncode == 0
            return CrowdReport(**json.load(clients.stdout)), memory
        finally:
            clients.kill()


def median(values) -> int:
    return sorted(values)[len(values) // 2]


def growth(samples: list[int]) -> tuple[int, int]:
    """RSS in bytes soon after the warm-up, and at the end."""
    later = samples[int(len(samples) * WARM_UP) :]
    part = max(1, len(later) // 4)
    return median(later[:part]), median(later[-part:])


def check_growth(memory: dict[str, list[int]]) -> None:
    for name, samples in memory.items():
        early, late = growth(samples)
        print(f"{name}: RSS {samples[0] >> 20} MB at first, {early >> 20} MB later, {late >> 20} MB at the end")
        print("  every tenth of the time:", *(s >> 20 for s in samples[:: max(1, len(samples) // 10)]))
    for name, samples in memory.items():
        early, late = growth(samples)
        assert late <= early * FLAT + SLACK_BYTES, f"{name} grows: {early} to {late} bytes"


def check_report(reported: CrowdReport, num_clients: int) -> None:
    assert reported.wrong == 0, reported.complaints
    assert reported.most_open == num_clients
    assert min(reported.whole / 8, reported.slow, reported.left) >= num_clients / 10


@pytest.mark.long
def test_two_thousand_clients_of_two_front_ends(tmp_path):
    folder = save_tiny(tmp_path / "model", 11)
    settings = ServeConfig(
        model=str(folder), api_server_count=2, max_num_seqs=MAX_NUM_SEQS, max_queue=MANY_CLIENTS,
        client_timeout=PATIENCE_S,
    )  # fmt: skip
    options = {"max_model_len": 256, "num_gpu_blocks_override": NUM_PAGES, "deterministic": True}
    with (
        bind("127.0.0.1", 0, PATIENCE_S) as listener,
        AsyncEngine(LLM(folder, max_num_seqs=MAX_NUM_SEQS, **options)) as engine,
    ):
        front = FrontEnds(2, settings, [], ServerState(), listener)
        front.start()
        try:
            front.show(engine)
            front.state.change(not_serving=None)
            answers = answers_alone(front.url)
            processes = {f"front end {n}": psutil.Process(each.pid) for n, each in sorted(front.processes.items())}
            processes |= {"main": psutil.Process(), "engine": psutil.Process(engine.llm.client.link.pid)}
            num_files = {name: process.num_fds() for name, process in processes.items()}
            reported, memory = loaded(Load(front.url, LONG_SECONDS, MANY_CLIENTS, MAX_TOKENS, answers), processes)
            print(f"\n{reported}")
            check_report(reported, MANY_CLIENTS)
            deadline = time.monotonic() + PATIENCE_S
            while front.coordinator.limits.num_places or any(
                process.num_fds() > num_files[name] for name, process in processes.items()
            ):
                assert time.monotonic() < deadline, front.coordinator.limits.num_places
            stats = asyncio.run(engine.stats())
            assert (stats["prompting"], stats["decoding"], stats["waiting"], stats["pages"]["in_use"]) == (0, 0, 0, 0)
            check_growth(memory)
        finally:
            front.stop()


@pytest.mark.slow
def test_five_hundred_clients(tmp_path):
    server = Server(tmp_path / "model")
    with server.engine, serving(server, server.engine, bind("127.0.0.1", 0, PATIENCE_S)) as url:
        answers = answers_alone(url)
        httpx.get(url + "/health")
        num_tasks, num_files = server.num_tasks(), psutil.Process().num_fds()
        load = Load(url, SECONDS, NUM_CLIENTS, MAX_TOKENS, answers)
        start = time.monotonic()
        reported, memory = loaded(load, server.processes())
        seconds = time.monotonic() - start
        print(f"\n{seconds:.0f} s: {reported}")
        print(f"engine: {server.stats()}")
        check_report(reported, NUM_CLIENTS)
        server.assert_nothing_left(num_tasks, num_files)
        check_growth(memory)


@pytest.mark.slow
def test_the_crowd_notices():
    """An answer that is not right, not whole or not there is reported of."""
    crowd = Crowd(Load("http://127.0.0.1:1", 0.0, 1, 2, ["ab"]))
    chunk = b'data: {"choices":[{"text":"%s"}],"usage":{"completion_tokens":2}}\n\n'
    head, end = b"HTTP/1.0 200 OK\r\n\r\n", b"data: [DONE]\n\n"
    crowd._check(head + chunk % b"ab" + end, 0)
    assert crowd.reported.wrong == 0
    for bad in (chunk % b"ac" + end, chunk % b"ab", b"", end[:5]):
        before = crowd.reported.wrong
        crowd._check(head + bad, 0)
        assert crowd.reported.wrong == before + 1
    crowd._check(b"HTTP/1.0 429 Too Many Requests\r\n\r\n{}", 0)
    assert len(crowd.reported.complaints) == MAX_COMPLAINTS == crowd.reported.wrong


@pytest.mark.slow
def test_growth_is_noticed():
    flat, leak = [100 << 20] * 100, [(100 + n) << 20 for n in range(100)]
    for samples, is_flat in ((flat, True), (leak, False)):
        early, late = growth(samples)
        assert (late <= early * FLAT + SLACK_BYTES) is is_flat
