"""Two front ends behind one port, over one scripted engine, all of them processes: what they share, and what is left
when one of them, the engine or the server ends.

A client is led to one front end by stopping the others while it connects.
"""

import asyncio
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import httpx
import pytest

from glm5.checkpoint.init import write_random
from glm5.common.errors import GlmError
from glm5.common.watching import is_stopped
from glm5.config.presets import preset
from glm5.config.serve import ServeConfig
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.serve.coordination import front_ends
from glm5.serve.coordination.front_ends import SILENT_SECONDS, FrontEnds
from glm5.serve.http.server import bind
from glm5.serve.operations import supervise
from glm5.serve.operations.supervise import ServerSetup
from glm5.serve.service.state import ServerState
from tests.support.cores import scripted_start
from tests.support.serving import bearer, key, scripted

SECONDS = 60  # an upper limit for what takes a moment
ALICE, BOB, EVE, BOSS, GRAFANA = map(bearer, ("alice", "bob", "eve", "boss", "grafana"))
KEYS = [
    key("alice", max_concurrency=2),
    key("bob", requests_per_minute=3),
    key("boss", role="admin"),
    key("grafana", role="metrics"),
]


class Cluster:
    """A server of two front ends under a supervisor, and clients of either."""

    def __init__(self, folder, listener, traces_endpoint):
        self.folder = str(folder)
        state = ServerState()
        given = {"model": self.folder, "served_model_name": ("tiny",), "otlp_traces_endpoint": traces_endpoint}
        settings = ServeConfig(**given, api_server_count=2, max_queue=50)
        self.front = FrontEnds(2, settings, KEYS, state, listener)
        self.engine: AsyncEngine | None = None
        self.num_times_up = threading.Semaphore(0)
        self.setup = ServerSetup(
            import_modules=lambda: None,
            start=self.start,
            make_app=lambda _: None,
            replace=self.front.show,
            report=self.report,
            state=state,
            supervise=True,
            pause=0.0,
            front=self.front,
        )
        self.clients: list[httpx.Client] = []

    def start(self):
        self.engine = AsyncEngine(LLM(self.folder, watchdog_timeout=SECONDS))
        self.engine.start()
        return self.engine

    def report(self, line):
        if line.startswith(("listening on ", "the engine answers again")):
            self.num_times_up.release()

    def wait_until_up(self):
        assert self.num_times_up.acquire(timeout=SECONDS)

    def pids(self) -> list[int]:
        """Of the front ends that serve."""
        found = [self.pid_of(member) for member in sorted(self.front._serving, key=lambda member: member.client)]
        return [pid for pid in found if pid is not None]

    def pid_of(self, member) -> int | None:
        process = self.front.processes.get(member.client)
        return None if process is None else process.pid

    @contextmanager
    def only(self, pid):
        """Whoever connects meanwhile is this front end's."""
        others = [other for other in self.pids() if other != pid]
        for other in others:
            os.kill(other, signal.SIGSTOP)
        try:
            until(lambda: all(map(is_stopped, others)))
            yield
        finally:
            for other in others:
                os.kill(other, signal.SIGCONT)

    def client(self, pid) -> httpx.Client:
        """A client that has a connection to this front end, and opens no other one."""
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        http = httpx.Client(base_url=self.front.url, timeout=SECONDS, headers=ALICE, limits=limits)
        self.clients.append(http)
        with self.only(pid):
            assert http.get("/health").status_code == 200
        return http

    def leaver(self, pid) -> socket.socket:
        """A client that has sent a request to this front end, and may leave."""
        body = b'{"input_ids": [5], "sampling_params": {"max_new_tokens": 40, "ignore_eos": true}}'
        head = f"POST /generate HTTP/1.1\r\nHost: a\r\nX-Api-Key: alice\r\nContent-Length: {len(body)}\r\n"
        with self.only(pid):
            client = socket.create_connection(urlsplit(self.front.url).netloc.split(":"))
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            return client

    def clients_of_both(self) -> list[httpx.Client]:
        until(lambda: len(self.pids()) == 2)
        return [self.client(pid) for pid in self.pids()]

    def num_running(self) -> int:
        return asyncio.run(self.engine.stats())["running"]

    def wait_for(self, num_running):
        until(lambda: self.num_running() == num_running)


def until(holds) -> None:
    deadline, pause = time.monotonic() + SECONDS, threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "it never comes"
        pause.wait(0.005)


def generate(http, first=5, rid=None, count=4, headers=ALICE) -> httpx.Response:
    options = {"max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": [first], "sampling_params": options} | ({} if rid is None else {"rid": rid})
    return http.post("/generate", json=body, headers=headers)


def metric(http, name) -> float:
    lines = http.get("/metrics", headers=GRAFANA).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def code_of(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def admin(http, path, **settings):
    assert http.post(path, json=settings, headers=BOSS).json()["success"]


def both_answer_alike(a, b):
    for number, http in enumerate((a, b)):
        assert generate(http, 10 * number).json()["output_ids"] == [10 * number + i for i in range(1, 5)]
        assert generate(http, headers=EVE).status_code == 401
        own = {"x-request-id": f"own-{number}"}
        assert http.get("/v1/models", headers=own).headers["x-request-id"] == f"own-{number}"
    assert a.get("/v1/models").json() == b.get("/v1/models").json()
    assert metric(a, "vllm:generation_tokens_total") == metric(b, "vllm:generation_tokens_total") == 8
    assert metric(b, "vllm:prompt_tokens_total") == 2
    assert metric(a, "vllm:num_requests_waiting") == metric(b, "vllm:num_requests_waiting") == 3  # the engine's: no sum


def responses_are_stored_for_both(a, b):
    mine = a.post("/v1/responses", json={"input": "hi", "max_output_tokens": 3}).json()
    path = f"/v1/responses/{mine['id']}"
    assert b.get(path).json() == mine
    assert b.get(path, headers=BOB).status_code == 404
    body = {"input": "and", "previous_response_id": mine["id"], "max_output_tokens": 3}
    assert b.post("/v1/responses", json=body).status_code == 200
    assert b.delete(path).json()["deleted"]
    assert a.get(path).status_code == 404


def limits_and_aborts_hold_for_both(cluster, pool, a):
    c, d = cluster.clients_of_both()
    admin(a, "/pause_generation", mode="in_place")
    running, leaver = pool.submit(generate, a, 5, "r0", 40), cluster.leaver(cluster.pids()[1])
    cluster.wait_for(2)
    assert metric(c, "glm5:http_requests_in_flight") == 3  # this one too
    for http in (c, d):
        assert code_of(generate(http)) == (429, "concurrency_limit_exceeded")
    for headers in (BOB, BOSS):  # another key's requests
        assert d.post("/abort_request", json={"rid": "r0"}, headers=headers).json()["num_ended"] == 0
    leaver.close()
    cluster.wait_for(1)
    until(lambda: d.post("/abort_request", json={"rid": "r0"}).json().get("num_ended") == 1)
    cluster.wait_for(0)
    assert running.result(SECONDS).json()["meta_info"]["finish_reason"]["type"] == "abort"
    admin(d, "/continue_generation")
    for http in (c, d, a):
        assert generate(http, headers=BOB).status_code in (200, 429)
    assert code_of(generate(d, headers=BOB)) == (429, "rate_limit_exceeded")


def kill(_, pid):
    os.kill(pid, signal.SIGKILL)


def hang(cluster, pid):
    """Stop it, and have its silence count for as long as it takes the watchdog to see it."""
    (silence,) = [member.silence for member in list(cluster.front._serving) if cluster.pid_of(member) == pid]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid))

    def is_gone():
        silence.seconds = 2 * SILENT_SECONDS  # a heartbeat that was under way ends it once more
        return pid not in cluster.pids()

    until(is_gone)


def a_front_end_that_is_lost_is_replaced(cluster, pool, lose):
    (a, b), (pid, _) = cluster.clients_of_both(), cluster.pids()
    before = metric(a, "vllm:generation_tokens_total"), metric(b, "http_requests_total")
    admin(b, "/pause_generation", mode="in_place")
    lost = pool.submit(generate, a, 5, "lost", 40)
    kept = pool.submit(generate, cluster.client(cluster.pids()[1]), 5, "kept", 40)
    cluster.wait_for(2)
    lose(cluster, pid)
    with pytest.raises(httpx.RemoteProtocolError):
        lost.result(SECONDS)
    cluster.wait_for(1)
    admin(b, "/continue_generation")
    assert kept.result(SECONDS).json()["output_ids"] == list(range(6, 46))
    admin(b, "/pause_generation", mode="in_place")
    until(lambda: len(cluster.pids()) == 2 and pid not in cluster.pids())
    one, other = cluster.clients_of_both()
    both = [pool.submit(generate, http, 5, None, 4) for http in (one, other)]  # the place of the lost one is free
    cluster.wait_for(2)
    admin(b, "/continue_generation")
    assert [each.result(SECONDS).status_code for each in both] == [200, 200]
    after = [metric(http, "vllm:generation_tokens_total") for http in cluster.clients_of_both()]
    assert after[0] == after[1] == before[0] + 40 + 4 + 4
    assert metric(b, "http_requests_total") > before[1]


def a_killed_engine_is_started_again(cluster, pool):
    a, b = cluster.clients_of_both()
    admin(b, "/pause_generation", mode="in_place")
    running = pool.submit(generate, a, 5, None, 40)
    cluster.wait_for(1)
    os.kill(cluster.engine.llm.client.link.pid, signal.SIGKILL)
    assert code_of(running.result(SECONDS)) == (503, "engine_stopped")
    cluster.wait_until_up()
    for http in (a, b):
        assert generate(http).json()["output_ids"] == [6, 7, 8, 9]
        assert metric(http, "glm5:engine_restarts_total") == 1


def sigterm_lets_both_finish(cluster, pool):
    (a, b), (c, d) = cluster.clients_of_both(), cluster.clients_of_both()
    admin(a, "/pause_generation", mode="in_place")
    running = [pool.submit(generate, http, 5, f"last-{i}", 40) for i, http in enumerate((a, b))]
    cluster.wait_for(2)
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: c.get("/ready").status_code == 503)
    assert code_of(d.get("/v1/models")) == (503, "draining")
    asyncio.run(cluster.engine.resume())
    assert [each.result(SECONDS).json()["output_ids"] for each in running] == [list(range(6, 46))] * 2


@pytest.mark.parametrize("num_settled", [0, 3])
def test_front_ends_that_end_early_again_and_again_end_the_server(monkeypatch, caplog, num_settled):
    ends = iter(range(100))

    async def run_one(_):
        number = next(ends)
        monkeypatch.setattr(front_ends, "SETTLED_SECONDS", -1 if number < num_settled else SECONDS)
        return 4700 + number, -signal.SIGKILL

    monkeypatch.setattr(FrontEnds, "_run_one", run_one)
    monkeypatch.setattr(front_ends, "PAUSE_SECONDS", 0)
    with bind("127.0.0.1", 0) as listener:
        front, engine = FrontEnds(1, ServeConfig(model="m"), [], ServerState(), listener), scripted()
        none = dict.fromkeys(("make_app", "replace", "report"), lambda _: None)
        setup = ServerSetup(lambda: None, lambda: engine, **none, state=front.state, front=front)
        with pytest.raises(GlmError) as caught:
            supervise.run(setup, listener)
    last = f"; the last was process {4704 + num_settled} (killed by SIGKILL)"
    assert str(caught.value).startswith("the server has ended: 5 front ends in a row, each in the place of the one bef")
    assert str(caught.value).endswith(last)
    assert len(caplog.messages) == 4 + num_settled
    assert all(line.endswith("(killed by SIGKILL); another one is started") for line in caplog.messages)


def test_two_front_ends(tmp_path, monkeypatch, caplog, collector):
    address, came = collector
    write_random(preset("tiny"), tmp_path / "tiny", seed=3)
    monkeypatch.setattr("glm5.engine.llm.Start", partial(scripted_start, "ok"))

    def act(cluster):
        try:
            cluster.wait_until_up()
            with ThreadPoolExecutor(2) as pool:
                a, b = cluster.clients_of_both()
                both_answer_alike(a, b)
                responses_are_stored_for_both(a, b)
                limits_and_aborts_hold_for_both(cluster, pool, a)
                for lose in (kill, hang):
                    a_front_end_that_is_lost_is_replaced(cluster, pool, lose)
                a_killed_engine_is_started_again(cluster, pool)
                sigterm_lets_both_finish(cluster, pool)
        except BaseException:
            os.kill(os.getpid(), signal.SIGINT)
            raise

    with bind("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        cluster = Cluster(tmp_path / "tiny", listener, address)
        acting = pool.submit(act, cluster)
        supervise.run(cluster.setup, listener)
        acting.result(SECONDS)
    assert not cluster.front.processes
    assert "; it was stopped, and is killed" in caplog.text
    traced = b"".join(content for _, content in came.queue)
    assert b"last-0" in traced
    assert b"last-1" in traced
    for http in cluster.clients:
        http.close()
