"""The HTTP of the load generator: bodies of every kind in every division, connections kept and lost."""

import asyncio

import pytest

from glm5.bench.serve.failure import BAD_ANSWER, DISCONNECTED, RequestFailed
from glm5.bench.serve.http import MAX_HEAD, Address, Connection, Pool
from glm5.common.errors import ConfigError
from tests.support.scripted_server import Script, in_memory, plain
from tests.support.virtual_time import virtual_time

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n8;x=1\r\n, world!\r\n0\r\n\r\n"
TRAILERS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\nD\r\nhello, world!\r\n0\r\nA: 1\r\nB: 2\r\n\r\n"
LENGTH = b"HTTP/1.1 201 Created\r\nContent-Length: 13\r\nServer: x\r\n\r\nhello, world!"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH
TO_END = b"HTTP/1.1 200 OK\r\n\r\nhello, world!"
OLD = b"HTTP/1.0 200 OK\r\nContent-Length: 13\r\n\r\nhello, world!"


class Wire(asyncio.Transport):
    """Takes what the client writes; the test plays the server."""

    def __init__(self):
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = close


def exchange(pieces: list[bytes], ends: bool = False):
    """(answer or failure, body, connection) of one request whose answer comes in `pieces`."""

    async def main():
        body = bytearray()
        connection, wire = Connection(asyncio.get_running_loop(), lambda _: None), Wire()
        connection.connection_made(wire)
        done = connection.send(b"GET", lambda _answer, piece, _now: body.extend(piece))
        assert wire.written == b"GET"
        for piece in pieces:
            if not wire.closed:
                connection.data_received(piece)
        if ends:
            connection.connection_lost(None)
        assert done.done()
        return done.exception() or done.result(), bytes(body), connection

    with virtual_time() as runner:
        return runner.run(main())


@pytest.mark.parametrize("message", [CHUNKED, TRAILERS, LENGTH, INTERIM, TO_END, OLD], ids=lambda m: m[:40].decode())
def test_a_body_is_the_same_however_it_is_divided(message):
    divisions = [[message], [message[k : k + 1] for k in range(len(message))]]
    divisions += [[message[:k], message[k:]] for k in range(1, len(message))]
    for pieces in divisions:
        answer, body, connection = exchange(pieces, ends=message is TO_END)
        assert not isinstance(answer, RequestFailed)
        assert body == b"hello, world!"
        assert answer.complete
        assert answer.status == (201 if b"201" in message else 200)
        assert connection.usable == (message not in (TO_END, OLD))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (b"SMTP ready\r\n\r\n", BAD_ANSWER),
        (b"HTTP/1.1 abc OK\r\n\r\n", BAD_ANSWER),
        (b"HTTP/1.1\r\n\r\n", BAD_ANSWER),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", BAD_ANSWER),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello", BAD_ANSWER),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", BAD_ANSWER),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD, BAD_ANSWER),
        (LENGTH[:-1], DISCONNECTED),
        (CHUNKED[:-2], DISCONNECTED),
        (b"", DISCONNECTED),
    ],
)
def test_what_is_no_answer_fails_by_kind(message, kind):
    failure, _, connection = exchange([message] if message else [], ends=kind == DISCONNECTED)
    assert failure.kind == kind
    assert not connection.usable


def test_bytes_that_nobody_asked_for_end_the_connection():
    answer, _, connection = exchange([LENGTH + b"more"])
    assert answer.complete
    assert not connection.usable


def ask_in_turn(handler, num, pause=0.0):
    """Statuses of requests sent one after the other, and the pool that sent them."""

    async def main():
        pool = Pool(await in_memory(handler)())
        statuses = []
        for _ in range(num):
            request = Address.of("http://x").request("GET", "/", {})
            try:
                statuses.append((await pool.send(request, lambda *_: None)).status)
            except RequestFailed as error:
                statuses.append(error.kind)
            await asyncio.sleep(pause)
        return statuses, pool

    with virtual_time() as runner:
        return runner.run(main())


def test_a_connection_serves_many_requests():
    statuses, pool = ask_in_turn(lambda _: plain({}), 5)
    assert (statuses, pool.num_opened) == ([200] * 5, 1)


def test_a_connection_that_was_closed_while_idle_is_replaced():
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    statuses, pool = ask_in_turn(lambda _: Script([(0.0, body)], close=True, raw=True), 3, pause=1.0)
    assert (statuses, pool.num_opened) == ([200] * 3, 3)


def test_a_request_on_a_kept_connection_that_closes_unanswered_is_sent_again():
    num = 0

    def handler(_request):
        nonlocal num
        num += 1
        return Script([], close=True, raw=True) if num == 2 else plain({})

    statuses, pool = ask_in_turn(handler, 2)
    assert (statuses, num, pool.num_opened) == ([200, 200], 3, 2)


def test_a_new_connection_that_closes_unanswered_is_an_error():
    statuses, _ = ask_in_turn(lambda _: Script([], close=True, raw=True), 2)
    assert statuses == [DISCONNECTED] * 2


def test_cancelling_closes_the_connection():
    async def main():
        pool = Pool(await in_memory(lambda _: Script([(9.0, b"x")]))())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await pool.send(Address.of("http://x").request("GET", "/", {}), lambda *_: None)
        await asyncio.sleep(0)
        assert not pool._all

    with virtual_time() as runner:
        runner.run(main())


@pytest.mark.parametrize(
    ("url", "line", "host"),
    [
        ("http://h:8000", "/v1/x", "h:8000"),
        ("http://h:8000/", "/v1/x", "h:8000"),
        ("http://h/v1", "/v1/x", "h"),
        ("https://h/api/v1/", "/api/v1/x", "h"),
        ("https://h:8443/api", "/api/v1/x", "h:8443"),
        ("http://[::1]:80", "/v1/x", "[::1]"),
    ],
)
def test_routes(url, line, host):
    request = Address.of(url).request("POST", "/v1/x", {"A": "b"}, b"{}").decode()
    assert request.startswith(f"POST {line} HTTP/1.1\r\nHost: {host}\r\n")
    assert request.endswith("\r\nA: b\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")


def test_routes_beside_v1():
    assert Address.of("http://h/api/v1").route("/metrics") == "/api/metrics"


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h:port", "http://h:99999"])
def test_what_is_no_address(url):
    with pytest.raises(ConfigError, match="is no address"):
        Address.of(url)
