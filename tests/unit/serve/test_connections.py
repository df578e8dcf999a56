"""How long a connection may wait for its client, how many there may be, and who goes when there are too many."""

import asyncio
import errno
import logging
import socket

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from glm5.common import open_files
from glm5.serve.http import connections
from glm5.serve.http.connections import (
    ACCEPTS_AT_ONCE,
    BODY,
    IDLE_SECONDS,
    LINGER_SECONDS,
    SPARE_FILES,
    Connection,
    ConnectionLimiter,
    ThrottledLog,
)
from glm5.serve.http.server import bind, serving
from tests.support.serving import ASK, CHAT, SECONDS, make_app, scripted, served
from tests.support.virtual_time import virtual_time

ASKED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
BODIED = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"


class Wire(asyncio.Transport):
    """What goes out of a connection, and when it ended."""

    def __init__(self, protocol):
        super().__init__()
        self.protocol, self.sent, self.ended_at, self.has_eof = protocol, b"", None, False
        protocol.connection_made(self)

    def write(self, data):
        if self.has_eof:
            raise RuntimeError("as asyncio's")
        self.sent += data

    def write_eof(self):
        self.has_eof = True

    def is_closing(self):
        return self.ended_at is not None

    def close(self):
        if self.ended_at is None:
            loop = asyncio.get_running_loop()
            self.ended_at = loop.time()
            loop.call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self):
        pass

    resume_reading = pause_reading

    @property
    def status(self):
        return int(self.sent.split(b" ", 2)[1]) if self.sent else None


async def answer(scope, receive, send):
    """At once, whatever else is to come of the request."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": b"x"})


async def never(scope, receive, send):
    await asyncio.Event().wait()


async def read(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await never(scope, receive, send)


def open_one(limiter, app=answer):
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    return Wire(Connection(limiter, config=config, server_state=ServerState(), app_state={}))


async def drip(wire, data, seconds=1.0):
    """A byte at a time, as long as the server hears."""
    for byte in data:
        if wire.has_eof or wire.is_closing():
            return
        wire.protocol.data_received(bytes([byte]))
        await asyncio.sleep(seconds)


def ended(script) -> tuple[float | None, Wire]:
    """When the script's connection ended, after it has run and much time passed."""

    async def main():
        wire = await script()
        await asyncio.sleep(1000)
        return wire.ended_at, wire

    with virtual_time() as runner:
        return runner.run(main())


def test_a_silent_connection_ends():
    async def script():
        return open_one(ConnectionLimiter(60))

    at, wire = ended(script)
    assert at == 60
    assert wire.sent == b""


def test_headers_have_so_long_from_the_accept_however_they_drip():
    async def script():
        wire = open_one(ConnectionLimiter(60))
        await asyncio.sleep(5)
        await drip(wire, b"GET / HTTP/1.1\r\nX: " + b"a" * 1000)
        return wire

    at, wire = ended(script)
    assert at == 60 + LINGER_SECONDS
    assert wire.status == 408
    assert b'"headers_timeout"' in wire.sent
    assert b"not complete after 60 s" in wire.sent


def test_headers_of_the_next_request_have_so_long_from_their_first_byte():
    async def script():
        wire = open_one(ConnectionLimiter(60))
        wire.protocol.data_received(ASKED)
        await asyncio.sleep(70)
        assert wire.status == 200
        wire.sent = b""
        await drip(wire, ASKED[:-1] + b"a" * 1000)
        return wire

    at, wire = ended(script)
    assert at == 70 + 60 + LINGER_SECONDS
    assert wire.status == 408


def test_a_connection_that_is_kept_ends_when_nothing_comes():
    async def script():
        wire = open_one(ConnectionLimiter(60))
        for _ in range(3):
            wire.protocol.data_received(ASKED)
            await asyncio.sleep(IDLE_SECONDS - 1)
        return wire

    at, wire = ended(script)
    assert at == 2 * (IDLE_SECONDS - 1) + IDLE_SECONDS
    assert wire.sent.count(b"HTTP/1.1 200") == 3


def test_the_rest_of_a_body_that_was_answered_has_its_time_too():
    async def script():
        wire = open_one(ConnectionLimiter(60))
        wire.protocol.data_received(BODIED)
        await asyncio.sleep(10)
        assert wire.status == 200
        await drip(wire, b"a" * 99, seconds=2)
        return wire

    at, _ = ended(script)
    assert at == 60


def test_a_connection_whose_rest_has_come_is_one_between_requests():
    async def script():
        wire = open_one(ConnectionLimiter(60))
        wire.protocol.data_received(BODIED)
        await asyncio.sleep(10)
        wire.protocol.data_received(b"a" * 100)
        return wire

    at, _ = ended(script)
    assert at == 10 + IDLE_SECONDS


def test_who_waits_for_the_model_is_not_timed():
    async def script():
        wire = open_one(ConnectionLimiter(60), never)
        wire.protocol.data_received(ASKED)
        return wire

    at, _ = ended(script)
    assert at is None


@pytest.mark.parametrize("has_read", [False, True])
def test_who_is_refused_may_read_why(has_read):
    """What it still sends is not answered; the connection ends when it has closed its side, or soon."""

    async def script():
        wire = open_one(ConnectionLimiter(60))
        for _ in range(3):
            wire.protocol.data_received(b"\0\r\n\r\n")
        assert wire.has_eof
        if has_read:
            assert not wire.protocol.eof_received()  # asyncio then closes
            wire.close()
        return wire

    at, wire = ended(script)
    assert at == (0 if has_read else LINGER_SECONDS)
    assert wire.sent.count(b"HTTP/1.1 ") == 1
    assert wire.status == 400


def test_a_bad_rest_of_a_body_gets_no_second_answer():
    async def script():
        wire = open_one(ConnectionLimiter(60))
        wire.protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(1)
        wire.protocol.data_received(b"zz\r\n")
        return wire

    at, wire = ended(script)
    assert at == 1 + LINGER_SECONDS
    assert wire.sent.count(b"HTTP/1.1 ") == 1
    assert wire.status == 200


def test_a_body_that_turns_bad_ends_its_request():
    left = []

    async def app(scope, receive, send):
        left.append((await receive())["type"])
        await answer(scope, receive, send)

    async def script():
        wire = open_one(ConnectionLimiter(60), app)
        wire.protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        wire.protocol.data_received(b"zz\r\n")
        return wire

    _, wire = ended(script)
    assert left == ["http.disconnect"]
    assert wire.sent.count(b"HTTP/1.1 ") == 1
    assert wire.status == 400


def test_parts_of_bodies_go_out_in_order_and_not_to_clients_that_were_refused():
    bodies = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = scope["extensions"][BODY]
        bodies.append(body)
        await asyncio.sleep(2)
        if body.is_open:
            body.write(b"second")
            body.flush()
        await send({"type": "http.response.body", "body": b""})

    async def main():
        limiter = ConnectionLimiter(60)
        wires = [open_one(limiter, app) for _ in range(3)]
        for wire in wires:
            wire.protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(1)
        heads = [wire.sent for wire in wires]
        for body in bodies:
            body.write(b"first")
        wires[1].protocol.data_received(b"zz\r\n")
        assert [wire.sent for wire in wires] == heads
        await asyncio.sleep(0)
        first = b"5\r\nfirst\r\n"
        assert [wire.sent for wire in wires] == [heads[0] + first, heads[1], heads[2] + first]
        await asyncio.sleep(5)
        rest = b"6\r\nsecond\r\n0\r\n\r\n"
        assert [wire.sent for wire in wires] == [heads[0] + first + rest, heads[1], heads[2] + first + rest]

    run(main)


def run(main):
    with virtual_time() as runner:
        return runner.run(main())


def test_one_too_many_ends_the_one_that_has_waited_longest():
    async def main():
        limiter = ConnectionLimiter(60)
        limiter.max_connections = 3
        wires = []
        for _ in range(5):
            wires.append(open_one(limiter))
            await asyncio.sleep(1)
        wires[2].protocol.data_received(ASKED)  # and so begins to wait anew
        await asyncio.sleep(1)
        wires += [open_one(limiter), open_one(limiter)]
        return [wire.ended_at for wire in wires]

    assert run(main) == [3, 4, None, 6, 6, None, None]


def test_those_that_send_nothing_go_first_and_bodies_last():
    async def main():
        limiter = ConnectionLimiter(60)
        limiter.max_connections = 4
        wires = {"body": open_one(limiter, read), "unread": open_one(limiter, never), "model": open_one(limiter, never)}
        wires["body"].protocol.data_received(BODIED + b"a")
        for name in ("unread", "model"):
            wires[name].protocol.data_received(ASKED)
        wires["unread"].protocol.pause_writing()
        await asyncio.sleep(1)
        ends = []
        for _ in range(6):
            new = open_one(limiter, never)
            ends.append({name for name, wire in wires.items() if wire.is_closing()})
            new.protocol.data_received(ASKED)
            await asyncio.sleep(1)
        return ends, new

    ends, last = run(main)
    # The first finds a place, the next two make one each; then all wait for the model.
    assert ends == [set(), {"unread"}, {"unread", "body"}, *3 * [{"unread", "body"}]]
    assert last.status == 503
    assert b"retry-after: " in last.sent.lower()
    assert b"connection: close" in last.sent.lower()
    assert b'"too_many_connections"' in last.sent


def test_a_client_that_reads_again_is_none_that_waits():
    async def main():
        limiter = ConnectionLimiter(60)
        limiter.max_connections = 1
        wire = open_one(limiter, never)
        wire.protocol.data_received(ASKED)
        await asyncio.sleep(1)
        wire.protocol.pause_writing()
        wire.protocol.resume_writing()
        open_one(limiter)
        return wire.ended_at

    assert run(main) is None


def test_there_may_be_as_many_as_files_may_be_open(monkeypatch):
    monkeypatch.setattr(open_files, "limit", lambda: 200)
    monkeypatch.setattr(open_files, "num_open", lambda: 22)

    async def main():
        limiter, counts = ConnectionLimiter(60), []
        wires = [open_one(limiter) for _ in range(2)]
        for limit in (200, 10, 10**9):
            monkeypatch.setattr(open_files, "limit", lambda limit=limit: limit)
            limiter.update_limit()
            counts.append((limiter.max_connections, sum(wire.is_closing() for wire in wires)))
        return counts

    assert run(main) == [(200 - 20 - SPARE_FILES, 0), (1, 1), (connections.MAX_CONNECTIONS, 1)]


def test_few_connections_are_told_of_at_the_start(monkeypatch, caplog):
    monkeypatch.setattr(open_files, "num_open", lambda: 20)
    limiter = ConnectionLimiter(60)
    for limit in (64, 100, 4096):
        monkeypatch.setattr(open_files, "limit", lambda limit=limit: limit)
        limiter.update_limit()
        limiter.warn_of_few()
    assert [line.partition("; raise the limit (ulimit -n)")[0] for line in caplog.messages] == [
        "only 1 connection is possible at the same time, as this process may have 64 open files",
        "only 32 connections are possible at the same time, as this process may have 100 open files",
    ]


def test_open_files_are_counted():
    before = open_files.num_open()
    with socket.socket(), socket.socket():
        assert open_files.num_open() == before + 2
    assert open_files.limit() > before


def test_one_cause_is_one_line_a_second(caplog):
    now = 100.0
    log = ThrottledLog(lambda: now)
    for now in (100.0, 100.1, 100.9, 101.0):  # noqa: B007, read by the clock
        log.warn("a", "too much")
    log.warn("b", "another")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["too much", "too much (2 more since the last line)", "another"]


def test_no_file_left_is_one_line_and_the_end_of_some(caplog):
    async def main():
        limiter = ConnectionLimiter(60, ThrottledLog(lambda: 0.0))
        wires = [open_one(limiter) for _ in range(3 * ACCEPTS_AT_ONCE)]
        context = {"message": "", "exception": OSError(errno.EMFILE, "Too many open files"), "socket": object()}
        for _ in range(2):
            limiter.on_loop_error(asyncio.get_running_loop(), context)
        return [wire.is_closing() for wire in wires]

    assert run(main) == [True] * 2 * ACCEPTS_AT_ONCE + [False] * ACCEPTS_AT_ONCE
    lines = [record.getMessage() for record in caplog.records if "accepted" in record.getMessage()]
    assert [line.partition(" (")[0] for line in lines] == ["no connection could be accepted: Too many open files"]


def test_other_errors_of_the_loop_are_told_as_ever(caplog):
    async def main():
        ConnectionLimiter(60).on_loop_error(
            asyncio.get_running_loop(), {"message": "a fault", "exception": KeyError("x")}
        )

    run(main)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == ["a fault"]


def test_nothing_that_a_client_sent_is_logged(caplog):
    caplog.set_level(logging.DEBUG)

    async def main():
        wire = open_one(ConnectionLimiter(60))
        wire.protocol.data_received(b"GET / HTTP/1.1\r\nAuthorization : Bearer a-secret\r\n\r\n")
        assert b'HTTP/1.1: illegal header line"' in wire.sent
        return wire.status

    assert run(main) == 400
    assert "bad_http" in caplog.text
    assert "secret" not in caplog.text


def test_a_flood_of_silent_connections_stops_nobody(monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    engine = scripted()
    with (
        serving(make_app(engine), engine, bind("127.0.0.1", 0)) as url,
        httpx.Client(base_url=url, timeout=SECONDS) as http,
    ):
        address = http.base_url.host, http.base_url.port
        silent = [socket.create_connection(address, timeout=SECONDS) for _ in range(40)]
        try:
            assert http.post(CHAT, json=ASK).status_code == 200
            for connection in silent[: 40 - 7]:  # 7 of them and the client are left
                assert connection.recv(1) == b""
        finally:
            for connection in silent:
                connection.close()


def test_a_server_ends_while_a_client_reads_why_it_was_refused():
    with served(scripted()) as http:
        refused = socket.create_connection((http.base_url.host, http.base_url.port), timeout=SECONDS)
        refused.sendall(b"\0\r\n\r\n")
        assert refused.recv(100).startswith(b"HTTP/1.1 400 ")
    refused.close()
