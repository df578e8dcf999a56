"""Requests that are no HTTP, or that two servers could read in two ways: a reason, and the end of the connection."""

import http.client
import json
import logging
import socket

import pytest

from glm5.serve.http.connections import MAX_HEAD_BYTES
from tests.support.serving import ASK, CHAT, SECONDS, scripted, served

HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
BODY = json.dumps(ASK).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
MANY = b"".join(b"X-%d: a\r\n" % number for number in range(10_000))


def chunked(chunks: bytes) -> bytes:
    return HEAD + CHUNKED + b"\r\n" + chunks


def headed(*headers: bytes, body: bytes = BODY) -> bytes:
    return HEAD + b"".join(headers) + b"\r\n" + body


REFUSED = {
    "a length beside chunks": (400, headed(LENGTH, CHUNKED, body=CHUNKS)),
    "chunks beside a length": (400, headed(CHUNKED, LENGTH)),
    "a wrong length beside chunks": (400, headed(b"Content-Length: 4\r\n", CHUNKED, body=CHUNKS)),
    "two lengths": (400, headed(LENGTH, b"Content-Length: 3\r\n")),
    "a list of lengths": (400, headed(b"Content-Length: 3, 4\r\n")),
    "a length with a sign": (400, headed(b"Content-Length: +3\r\n")),
    "a length of 5000 digits": (400, headed(b"Content-Length: " + b"9" * 5000 + b"\r\n")),
    "chunked twice": (400, headed(CHUNKED, CHUNKED, body=CHUNKS)),
    "chunked twice in a line": (400, headed(b"Transfer-Encoding: chunked, chunked\r\n", body=CHUNKS)),
    "another coding": (400, headed(b"Transfer-Encoding: gzip\r\n")),
    "nearly chunked": (400, headed(b"Transfer-Encoding: xchunked\r\n", body=CHUNKS)),
    "a chunk size in letters": (400, chunked(b"zz\r\nabc\r\n0\r\n\r\n")),
    "a chunk size below 0": (400, chunked(b"-5\r\nabc\r\n0\r\n\r\n")),
    "a chunk size as Python writes it": (400, chunked(b"0x5\r\nabcde\r\n0\r\n\r\n")),
    "a chunk size of 30 digits": (400, chunked(b"f" * 30 + b"\r\nabc\r\n0\r\n\r\n")),
    "a chunk that is longer than it says": (400, chunked(b"3\r\nabcX\r\n0\r\n\r\n")),
    "a folded line before all": (400, b"POST / HTTP/1.1\r\n a: b\r\nHost: x\r\n\r\n"),
    "a name with a space": (400, headed(LENGTH, b"X A: b\r\n")),
    "a space after a name": (400, headed(b"Content-Length : %d\r\n" % len(BODY))),
    "no colon": (400, headed(LENGTH, b"XA\r\n")),
    "a zero byte": (400, headed(LENGTH, b"X: a\0b\r\n")),
    "a bare CR": (400, headed(LENGTH, b"X: a\rContent-Length: 3\r\n")),
    "no host": (400, b"GET /health HTTP/1.1\r\n\r\n"),
    "two hosts": (400, headed(LENGTH, b"Host: x\r\n")),
    "two spaces": (400, b"GET  /health HTTP/1.1\r\nHost: x\r\n\r\n"),
    "HTTP/0.9": (400, b"GET /health\r\n\r\n"),
    "HTTP/2": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "TLS": (400, bytes.fromhex("1603010200010001fc0303") + b"\1" * 500),
    "a long header": (431, headed(LENGTH, b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n")),
    "10,000 headers": (431, headed(LENGTH, MANY)),
    "a long target": (431, b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
    "headers without end": (431, HEAD + MANY * 10),
}
SERVED = {
    "chunks": chunked(CHUNKS),
    "chunks with extensions": chunked(b"%x;a=b\r\n%s\r\n0;x\r\n\r\n" % (len(BODY), BODY)),
    "trailers": chunked(CHUNKS[:-2] + b"X-T: 1\r\n\r\n"),
    "one length twice": headed(LENGTH, LENGTH),
    "a folded line": headed(LENGTH, b"X-A: a\r\n b\r\n"),
    "lines that end in LF": (HEAD + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
    "HTTP/1.0": (HEAD + LENGTH + b"\r\n").replace(b"1.1", b"1.0") + BODY,
    "an offer to upgrade": headed(LENGTH, b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
    "an offer of websockets": headed(LENGTH, b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    "a wish for a word before": headed(LENGTH, b"Expect: 100-continue\r\n"),
}


@pytest.fixture(scope="module")
def place():
    with served(scripted()) as http:
        yield http.base_url.host, http.base_url.port


def answer_of(connection: socket.socket) -> tuple[int, bytes]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.read()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(place, kind, caplog):
    caplog.set_level(logging.DEBUG)
    status, data = REFUSED[kind]
    with socket.create_connection(place, timeout=SECONDS) as connection:
        connection.sendall(data)
        got, body = answer_of(connection)
        error = json.loads(body)["error"]
        assert (got, error["type"]) == (status, "server_error" if status > 500 else "invalid_request_error")
        assert error["code"]
        assert connection.recv(1) == b""  # and the connection ends
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("kind", SERVED)
def test_what_is_served(place, kind):
    with socket.create_connection(place, timeout=SECONDS) as connection:
        connection.sendall(SERVED[kind])
        status, body = answer_of(connection)
        assert status == 200
        assert json.loads(body)["choices"]


def test_a_bad_request_after_a_good_one(place):
    with socket.create_connection(place, timeout=SECONDS) as connection:
        connection.sendall(headed(LENGTH) + b"\0\r\n\r\n")
        file = connection.makefile("rb")
        assert file.readline() == b"HTTP/1.1 200 OK\r\n"
        assert file.read().partition(b"HTTP/1.1 ")[2].startswith(b"400 ")
