"""Ends of `glm5 serve` as a process: a rolling restart under load, an engine that is killed, and one started again."""

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import httpx
import psutil
import pytest

from tests.support.serving import CHAT, scripted, served
from tests.unit.cli.test_serve import SECONDS, server

NUM_CLIENTS, MAX_TOKENS = 6, 40
ASK = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "stream": True}
ENDLESS = ASK | {"max_tokens": None}


def engine_of(process) -> psutil.Process:
    (engine,) = psutil.Process(process.pid).children()
    return engine


def ended_with(lines) -> dict:
    """The error that a stream ends with."""
    rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    return json.loads(rest[-2].removeprefix("data: "))["error"]


class Load:
    """Clients that ask the first server that takes them, until `enough`."""

    def __init__(self, urls):
        self.urls, self.enough = urls, threading.Event()
        self.whole, self.turned_away = count(), count()
        self.running = threading.Event()

    def client(self, number: int) -> None:
        with httpx.Client(timeout=SECONDS) as http:
            for turn in count():
                if self.enough.is_set():
                    return
                self.ask(http, ASK | {"max_tokens": MAX_TOKENS, "seed": 100 * number + turn})

    def ask(self, http, body) -> None:
        for url in self.urls:
            accepted = False
            try:
                with http.stream("POST", url + CHAT, json=body) as answer:
                    if answer.status_code == 503:
                        next(self.turned_away)
                        continue
                    assert answer.status_code == 200, answer.read()
                    accepted = True
                    lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if accepted:
                    raise
                next(self.turned_away)
                continue
            assert lines[-1] == "data: [DONE]"
            last = json.loads(lines[-2].removeprefix("data: "))
            assert last["choices"][0]["finish_reason"] in ("length", "stop"), last
            self.running.set()
            next(self.whole)
            return
        raise AssertionError("nobody answers")


def test_a_rolling_restart_loses_no_accepted_request(checkpoint):
    with served(scripted("</think>I am new here")) as successor, server(checkpoint) as (process, _, url):
        process.stdout.close()  # nobody reads what it says; that changes nothing
        load = Load([url, str(successor.base_url)])
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(load.client, number) for number in range(NUM_CLIENTS)]
            try:
                assert load.running.wait(SECONDS)
                process.send_signal(signal.SIGTERM)
                assert process.wait(SECONDS) == 0
            finally:
                load.enough.set()
            for client in clients:
                client.result(SECONDS)
        assert "Traceback" not in process.stderr.read()
    assert next(load.whole) >= NUM_CLIENTS
    assert next(load.turned_away) > 0


def test_a_killed_engine_is_told_of_and_ends_the_server(checkpoint):
    with server(checkpoint, "--dead-engine-timeout", "1") as (process, _, url):
        with httpx.stream("POST", url + CHAT, json=ENDLESS, timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine_of(process).kill()
            assert "SIGKILL" in ended_with(lines)["message"]
        assert process.wait(SECONDS) == 1
        error = process.stderr.read()
    assert error.splitlines()[-1].startswith("glm5: error: the engine is not running: ")
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_killed_rank_ends_the_whole_group(checkpoint):
    """What LeaderWorkerSet's RecreateGroupOnPodRestart relies on."""
    with server(checkpoint, "--dead-engine-timeout", "0", "--tensor-parallel-size", "2") as (process, _, url):
        assert httpx.get(url + "/ready", timeout=SECONDS).status_code == 200
        engine = engine_of(process)
        (rank,) = engine.children()
        rank.kill()
        assert process.wait(SECONDS) == 1
        assert "rank 1 of 2" in process.stderr.read()
        psutil.wait_procs([engine, rank], SECONDS)
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in (engine, rank))


def test_a_supervised_engine_is_started_again(checkpoint):
    with server(checkpoint, "--supervise") as (process, _, url):
        engine = engine_of(process)
        with httpx.stream("POST", url + CHAT, json=ENDLESS, timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.kill()
            assert ended_with(lines)["code"] == "engine_stopped"
        health = httpx.get(url + "/health", timeout=SECONDS)
        assert health.status_code in (200, 503)
        said = next(line for line in process.stdout if line.startswith("the engine "))
        assert "SIGKILL" in said
        assert said.endswith("is restarted\n")
        assert next(process.stdout) == "the engine answers again\n"
        assert httpx.get(url + "/health", timeout=SECONDS).status_code == 200
        answer = httpx.post(url + CHAT, json=ASK | {"stream": False, "max_tokens": 3}, timeout=SECONDS).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert engine_of(process).pid != engine.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
