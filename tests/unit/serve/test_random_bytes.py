"""1 MB of random bytes at every route, as a body and as a request: refused with a 4xx, and the server goes on."""

import random
import socket
from contextlib import suppress

import pytest

from glm5.serve.http.documents import document
from tests.support.serving import ASK, CHAT, SECONDS, bearer, key, make_app, scripted, served

NUM_BYTES = 2**20
PLAIN = ["/", "/dashboard", "/page/app.js", "/openapi.json", "/admin/openapi.json", "/nowhere"]
BODILESS = {"/ping"}  # takes POST, and reads none
TYPES = ["application/json", "application/octet-stream", None]


def routes() -> list[tuple[str, str]]:
    """(method, path) of the documents' operations, and of what they do not tell."""
    app = make_app(scripted())
    paths = [document(app, is_admin=is_admin)["paths"].items() for is_admin in (False, True)]
    reported = [(method.upper(), path) for some in paths for path, operations in some for method in operations]
    assert len(reported) > 30
    return reported + [("GET", path) for path in PLAIN]


@pytest.fixture(scope="module")
def engine():
    return scripted()


@pytest.fixture(scope="module")
def http(engine):
    with served(engine, key("user"), key("boss", role="admin")) as http:
        yield http


@pytest.fixture(autouse=True)
def goes_on(http, engine):
    yield
    assert http.get("/health").status_code == 200
    assert http.post(CHAT, json=ASK, headers=bearer("user")).status_code == 200
    assert {name for name, *_ in engine.calls} <= {"stats"}  # nothing was taken for an order to the engine


@pytest.mark.parametrize(("method", "path"), routes())
def test_as_a_body(http, method, path, rng):
    data = rng.randbytes(NUM_BYTES)
    place = path.replace("{", "").replace("}", "")
    for content_type in TYPES:
        headers = bearer("boss") | ({"Content-Type": content_type} if content_type else {})
        answer = http.request("POST", place, content=data, headers=headers)
        assert 400 <= answer.status_code < 500 or path in BODILESS, answer.text
        answer = http.request(method, place, content=data, headers=headers)
        # A body means nothing to the others, and is not read.
        assert answer.status_code < 500 if method in ("GET", "DELETE") else 400 <= answer.status_code < 500


def sent(http, data: bytes) -> bytes:
    """What comes back on a connection of its own; data that nobody reads to the end may end the connection."""
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=SECONDS) as connection:
        received = b""
        with suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(2**16):
                received += piece
        return received


def text_of(rng: random.Random) -> bytes:
    return bytes(rng.choices(range(0x21, 0x7F), k=NUM_BYTES))


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer user\r\n"
RAW = {
    "bytes": lambda rng: rng.randbytes(NUM_BYTES),
    "lines": lambda rng: rng.randbytes(NUM_BYTES).replace(b"\0", b"\r\n"),
    "a request line": lambda rng: b"GET /" + text_of(rng) + b" HTTP/1.1\r\n\r\n",
    "a header": lambda rng: HEAD + b"X-A: " + text_of(rng) + b"\r\n\r\n",
    "headers": lambda rng: HEAD + b"".join(b"X-%d: a\r\n" % number for number in range(NUM_BYTES // 10)) + b"\r\n",
    "chunks": lambda rng: HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + rng.randbytes(NUM_BYTES),
    "a bad length": lambda rng: HEAD + b"Content-Length: -5\r\n\r\n" + rng.randbytes(NUM_BYTES),
    "two lengths": lambda rng: HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + rng.randbytes(NUM_BYTES),
    "a short body": lambda rng: HEAD + b"Content-Length: 2000000\r\n\r\n" + rng.randbytes(NUM_BYTES),
    "an endless length": lambda rng: HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("kind", RAW)
def test_as_a_request(http, kind, rng):
    received = sent(http, RAW[kind](rng))
    assert received[:10] in (b"", b"HTTP/1.1 4"), received[:1000]


@pytest.mark.parametrize("name", ["x-request-id", "authorization", "content-type", "user-agent", "accept", "origin"])
def test_as_a_header(http, name, rng):
    """As much of it as one may be long."""
    for _ in range(20):
        value = bytes(rng.choices([*range(0x21, 0x7F), *range(0x80, 0x100)], k=rng.randrange(1, 2000)))
        answer = http.post(CHAT, json=ASK, headers=[*bearer("user").items(), (name.encode(), value)])
        assert answer.status_code in (200, 400, 401, 415), answer.text
