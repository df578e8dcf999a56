"""From the first moment of a server to its last: signals, a dying engine, and what its clients get meanwhile.

The server runs in the test's thread, which is the main one and hears the signals; another thread is the client.
"""

import json
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from glm5.common.errors import CheckpointError, EngineDead
from glm5.serve.http.server import bind, url_of
from glm5.serve.operations import supervise
from glm5.serve.operations.supervise import ServerSetup
from glm5.serve.service.state import ServerState
from tests.support.serving import ASK, CHAT, SECONDS, make_app, scripted


def send(number: int) -> None:
    os.kill(os.getpid(), number)


class Program:
    """Engines, one after another; an exception in their place is what a start fails with."""

    def __init__(self, *engines, **settings):
        self.engines, self.started, self.reports = list(engines), [], []
        self.app = None
        self.listening = threading.Event()
        self.setup = ServerSetup(
            lambda: None, self.start, self.make_app, self.replace, self.report, ServerState(), pause=0.0, **settings
        )

    def start(self):
        engine = self.engines.pop(0)
        if isinstance(engine, BaseException):
            raise engine
        if callable(engine):
            return engine()
        self.started.append(engine)
        return engine

    def make_app(self, engine):
        self.app = make_app(engine, state=self.setup.state)
        return self.app

    def replace(self, engine):
        self.app.state.service.engine.replace(engine)

    def report(self, line):
        self.reports.append(line)
        if line.startswith(("listening on ", "the engine answers again")):
            self.listening.set()


@contextmanager
def client_of(program, act):
    """Runs `act(http)` on another thread as soon as the server answers; whatever fails there fails the test."""
    with bind("127.0.0.1", 0) as listener, httpx.Client(base_url=url_of(listener), timeout=SECONDS) as http:

        def main():
            assert program.listening.wait(SECONDS)
            try:
                return act(http)
            except BaseException:
                send(signal.SIGINT)
                raise

        with ThreadPoolExecutor(1) as pool:
            acting = pool.submit(main)
            yield listener
            acting.result(SECONDS)


def run(program, act) -> None:
    with client_of(program, act) as listener:
        supervise.run(program.setup, listener)


def hanging(script="a long thought"):
    engine = scripted(script)
    engine.hangs = True
    return engine


def test_sigterm_lets_what_is_under_way_come_to_its_end():
    engine = hanging("</think>to the end")
    program = Program(engine)

    def act(http):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(http.post, CHAT, json=ASK)
            assert engine.started.wait(SECONDS)
            send(signal.SIGTERM)
            while http.get("/ready").status_code == 200:
                pass
            assert http.get("/health").status_code == 200
            assert http.post(CHAT, json=ASK).json()["error"]["code"] == "draining"
            engine.release()
            answer = running.result(SECONDS).json()
        assert answer["choices"][0]["message"]["content"] == "to the end"
        assert answer["choices"][0]["finish_reason"] == "stop"

    run(program, act)
    assert engine.is_closed
    assert engine.stopped_because == "it was closed"
    assert program.reports[-1].startswith("draining 1 requests")


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["Ctrl-C", "SIGTERM twice"]
)
def test_what_is_under_way_can_be_ended(signals, monkeypatch, caplog):
    engine, killed = hanging(), threading.Event()

    def kill():
        engine.die("it was killed")
        killed.set()

    if len(signals) == 2:  # an engine that takes its time to close
        monkeypatch.setattr(engine, "close", killed.wait)
        monkeypatch.setattr(engine, "kill", kill)
    program = Program(engine)

    def act(http):
        with http.stream("POST", CHAT, json=ASK | {"stream": True}) as answer:
            for number in signals:
                send(number)
                while not program.setup.state.is_draining:
                    pass
            rest = [line for line in answer.iter_lines() if line]
        assert "the server is closing" in rest[-2]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "server_closing"
        assert rest[-1] == "data: [DONE]"

    with caplog.at_level(logging.INFO):
        run(program, act)
    assert killed.is_set() == (len(signals) == 2)
    assert [line for line in caplog.messages if line.endswith(", server_closing")]
    assert "EngineDead" not in caplog.text


def test_draining_ends_when_its_time_is_over():
    engine = hanging()
    program = Program(engine, shutdown_timeout=0.1)

    def act(http):
        with http.stream("POST", CHAT, json=ASK | {"stream": True}) as answer:
            send(signal.SIGTERM)
            rest = [line for line in answer.iter_lines() if line]
        assert "the server is closing" in rest[-2]

    run(program, act)


def test_a_dead_engine_is_told_of_and_ends_the_server():
    engine = hanging()
    program = Program(engine, dead_engine_timeout=SECONDS)

    def act(http):
        with http.stream("POST", CHAT, json=ASK | {"stream": True}) as answer:
            engine.die("its process was killed")
            rest = [line for line in answer.iter_lines() if line]
        assert "its process was killed" in rest[-2]
        health = http.get("/health")
        assert health.status_code == 503
        assert "its process was killed" in health.json()["error"]["message"]
        assert http.post(CHAT, json=ASK).status_code == 503
        send(signal.SIGTERM)  # need not wait so long

    with pytest.raises(EngineDead, match="its process was killed"):
        run(program, act)


def test_a_dead_engine_ends_the_server_by_itself():
    engine = scripted()
    program = Program(engine, dead_engine_timeout=0)
    with pytest.raises(EngineDead, match="out of memory"):
        run(program, lambda _: engine.die("out of memory"))


def test_a_supervised_engine_is_started_again():
    first, second = hanging(), scripted("</think>again")
    program = Program(first, CheckpointError("the disk is busy"), second, supervise=True)

    def act(http):
        program.listening.clear()
        with http.stream("POST", CHAT, json=ASK | {"stream": True}) as answer:
            first.die("its process was killed")
            rest = [line for line in answer.iter_lines() if line]
        assert "its process was killed" in rest[-2]
        assert program.listening.wait(SECONDS)
        assert http.get("/health").status_code == 200
        answer = http.post(CHAT, json=ASK).json()
        assert answer["choices"][0]["message"]["content"] == "again"
        assert 'glm5:engine_restarts_total{model_name="tiny",engine="0"} 1' in http.get("/metrics").text
        send(signal.SIGTERM)

    run(program, act)
    assert first.is_closed
    assert second.is_closed


def test_health_says_that_the_engine_is_started_again():
    first, second, may_go_on, reported = scripted(), scripted(), threading.Event(), []

    def start():
        assert may_go_on.wait(SECONDS)
        program.started.append(second)
        return second

    def act(http):
        program.listening.clear()
        first.die("its process was killed")
        while "start 2" not in (program.setup.state.not_serving or ""):
            pass
        reported.append(http.get("/health"))
        may_go_on.set()
        assert program.listening.wait(SECONDS)
        assert http.get("/health").status_code == 200
        send(signal.SIGTERM)

    program = Program(first, CheckpointError("the disk is busy"), start, supervise=True)
    run(program, act)
    assert reported[0].status_code == 503
    assert reported[0].json()["error"]["message"] == (
        "the engine is not running: its process was killed; the last start has failed: the disk is busy; "
        "the engine is being restarted (start 2 of 5)"
    )


def test_an_engine_that_does_not_last_is_given_up():
    engines = [scripted() for _ in range(supervise.MAX_STARTS)]
    for engine in engines:
        engine.stopped_because = "it fell over"
    program = Program(scripted(), *engines, supervise=True)
    with pytest.raises(EngineDead, match="it was restarted 5 times and failed early each time"):
        run(program, lambda _: program.started[0].die("it fell over"))
    assert len(program.started) == 1 + supervise.MAX_STARTS


def test_an_engine_that_has_lasted_is_always_started_again(monkeypatch):
    monkeypatch.setattr(supervise, "STABLE_SECONDS", -1)
    engines = [scripted() for _ in range(3 * supervise.MAX_STARTS)]
    for engine in engines:
        engine.stopped_because = "it fell over"
    last = scripted()
    program = Program(scripted(), *engines, last, supervise=True)

    def act(http):
        program.started[0].die("it fell over")
        while program.started[-1] is not last or http.get("/health").status_code != 200:
            pass
        send(signal.SIGTERM)

    run(program, act)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_signals_interrupt_a_start(number, error, again):
    def start():
        signal.raise_signal(number)
        raise AssertionError("the signal came to nothing")

    first = scripted()
    program = Program(*([first] if again else []), start, supervise=True)
    program.listening.set()
    with pytest.raises(error):
        run(program, lambda _: first.die("it fell over") if again else None)
    assert signal.getsignal(number) is not None
    if again:
        assert first.is_closed


def test_a_signal_before_the_start_interrupts_it_too():
    program = Program(scripted())
    say = program.report

    def report_and_end(line):
        say(line)
        signal.raise_signal(signal.SIGTERM)

    program.setup = replace(program.setup, report=report_and_end)
    with bind("127.0.0.1", 0) as listener, pytest.raises(SystemExit):
        supervise.run(program.setup, listener)
    assert not program.started


def test_a_model_that_cannot_be_loaded_is_the_caller_s_to_tell():
    program, others = Program(CheckpointError("no such model")), set(threading.enumerate())
    with bind("127.0.0.1", 0) as listener:
        with pytest.raises(CheckpointError, match="no such model"):
            supervise.run(program.setup, listener)
        assert listener.fileno() == -1
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name == "glm5-server"]


def test_it_says_where_it_listens_before_there_is_a_model():
    program = Program(CheckpointError("no such model"))
    requested = []

    def start():
        url = program.reports[-1].split()[1].removesuffix("/health")
        requested.append(httpx.get(f"{url}/health", timeout=SECONDS))
        raise CheckpointError("no such model")

    program.setup = replace(program.setup, start=start)
    with bind("127.0.0.1", 0) as listener, pytest.raises(CheckpointError):
        supervise.run(program.setup, listener)
    assert requested[0].status_code == 503
    assert "it is being loaded" in requested[0].json()["error"]["message"]
