"""Who comes in, where, and how much: without keys, with keys, beyond a limit; and what every answer carries."""

import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from glm5.serve.http.access import ADMIN_PATHS
from tests.support.serving import ASK, CHAT, SECONDS, bearer, key, scripted, served

OPEN = ["/", "/dashboard", "/page/chat.js", "/health", "/ready", "/health_generate", "/openapi.json"]
KEYS = [key("alice"), key("bob"), key("grafana", role="metrics"), key("boss", role="admin")]


def code_of(answer) -> str:
    return answer.json()["error"]["code"]


@pytest.fixture(scope="module")
def keyed():
    with served(scripted(), *KEYS) as http:
        yield http


def test_without_keys_everybody_may_use_it_and_nobody_may_change_it():
    with served(scripted()) as http:
        for path in [*OPEN, "/v1/models", "/metrics"]:
            assert http.get(path).status_code == 200, path
        assert http.post(CHAT, json=ASK, headers=bearer("whatever")).status_code == 200
        answer = http.post("/flush_cache", headers=bearer("whatever"))
    assert (answer.status_code, code_of(answer)) == (403, "no_admin_key")
    assert "--admin-api-key" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", OPEN)
def test_what_needs_no_key(keyed, path):
    assert keyed.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/flush_cache", CHAT, "/nowhere", "/page", "/healthy"])
@pytest.mark.parametrize(
    "headers",
    [{}, bearer("eve"), {"Authorization": "Basic alice"}, {"Authorization": "alice"}, {"x-api-key": "eve"}],
    ids=str,
)
def test_everything_else_needs_one(keyed, path, headers):
    answer = keyed.get(path, headers=headers)
    assert (answer.status_code, code_of(answer)) == (401, "invalid_api_key")


# path, who may GET it without being turned away
ROLES = [
    ("/v1/models", {"alice", "bob", "boss"}),
    ("/metrics", {"grafana", "boss"}),
    ("/flush_cache", {"boss"}),
    ("/admin/openapi.json", {"boss"}),
]


@pytest.mark.parametrize(("path", "allowed"), ROLES)
@pytest.mark.parametrize("name", ["alice", "bob", "grafana", "boss"])
def test_what_a_role_may(keyed, path, allowed, name):
    answer = keyed.get(path, headers=bearer(name))
    if name in allowed:
        assert answer.status_code == 200
    else:
        assert (answer.status_code, code_of(answer)) == (403, "forbidden")


def test_keys_come_as_anthropic_s_clients_send_them_too(keyed):
    assert keyed.get("/v1/models", headers={"x-api-key": "alice"}).status_code == 200
    assert keyed.get("/v1/models", headers={"authorization": "bearer  bob"}).status_code == 200


def test_the_only_key_may_read_the_metrics():
    with served(scripted(), key("alice"), key("boss", role="admin")) as http:
        assert http.get("/metrics", headers=bearer("alice")).status_code == 200
        assert http.get("/flush_cache", headers=bearer("alice")).status_code == 403


def test_every_admin_route_is_guarded_as_one(keyed):
    """Paths are what is guarded, tags are what the routes say of themselves."""
    paths = set(keyed.get("/admin/openapi.json", headers=bearer("boss")).json()["paths"])
    assert paths >= {"/flush_cache", "/sleep", "/update_weights_from_disk"}
    assert paths | {"/admin/openapi.json"} == ADMIN_PATHS
    assert not paths & set(keyed.get("/openapi.json").json()["paths"])


def test_a_request_is_cached_under_the_salt_of_its_key_alone():
    engine = scripted()
    salts = {}
    with served(engine, key("alice"), key("bob")) as http:
        for name in ("alice", "bob", "alice"):
            assert http.post(CHAT, json=ASK, headers=bearer(name)).status_code == 200
            salts.setdefault(name, set()).add(engine.options["cache_salt"])
    assert len(salts["alice"]) == len(salts["bob"]) == 1
    assert salts["alice"] != salts["bob"]


def test_request_ids(keyed):
    def answered(given: dict) -> str:
        return keyed.get("/v1/models", headers=bearer("alice") | given).headers["x-request-id"]

    assert answered({"X-Request-Id": "mine-1"}) == "mine-1"
    own = {answered({}), answered({}), answered({"X-Request-Id": "a b"}), answered({"X-Request-Id": "x" * 129})}
    assert len(own) == 4
    assert keyed.get("/v1/models").headers["x-request-id"]  # of a refusal too


def test_rates_and_what_a_refusal_says():
    with served(scripted(), key("alice", requests_per_minute=2), key("bob")) as http:
        codes = [http.post(CHAT, json=ASK, headers=bearer("alice")).status_code for _ in range(2)]
        refused = http.post(CHAT, json=ASK, headers=bearer("alice"))
        assert http.post(CHAT, json=ASK, headers=bearer("bob")).status_code == 200
        assert http.get("/v1/models", headers=bearer("alice")).status_code == 200
    assert codes == [200, 200]
    assert (refused.status_code, code_of(refused)) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 30


class Busy:
    """A server with hanging answers; `wait_for` so many of them."""

    def __init__(self, http, engine, pool):
        self.http, self.engine, self.pool = http, engine, pool

    def ask(self, name="alice", **fields):
        self.engine.started.clear()
        done = self.pool.submit(self.http.post, CHAT, json=ASK | fields, headers=bearer(name))
        assert self.engine.started.wait(SECONDS)
        return done


@pytest.fixture
def busy():
    engine = scripted("</think>some text")
    engine.hangs = True
    with (
        ThreadPoolExecutor(8) as pool,
        served(engine, key("alice", max_concurrency=2), key("bob"), max_num_seqs=1, max_queue=2) as http,
    ):
        try:
            yield Busy(http, engine, pool)
        finally:
            engine.release()


def test_requests_at_the_same_time(busy):
    requested = [busy.ask(), busy.ask()]
    refused = busy.http.post(CHAT, json=ASK, headers=bearer("alice"))
    assert (refused.status_code, code_of(refused)) == (429, "concurrency_limit_exceeded")
    assert refused.headers["retry-after"]
    requested.append(busy.ask("bob"))
    busy.engine.release()
    assert [done.result(SECONDS).status_code for done in requested] == [200, 200, 200]
    assert busy.http.post(CHAT, json=ASK, headers=bearer("alice")).status_code == 200


def test_a_full_queue_turns_away_whoever_comes(busy):
    for _ in range(3):
        busy.ask("bob")
    refused = busy.http.post(CHAT, json=ASK | {"stream": True}, headers=bearer("alice"))
    assert (refused.status_code, code_of(refused)) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert busy.http.get("/health").status_code == 200


def test_who_leaves_gives_its_place_back():
    engine = scripted("some text")
    engine.hangs = True
    with served(engine, max_num_seqs=1, max_queue=0) as http:
        for _ in range(3):
            engine.left.clear()
            with http.stream("POST", CHAT, json=ASK | {"stream": True}) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()  # kept: the connection ends with it
                assert next(lines)
                assert httpx.post(http.base_url.join(CHAT), json=ASK, timeout=SECONDS).status_code == 429
            assert engine.left.wait(SECONDS)
            # The engine is left first, the place given back next.
            engine.hangs = False
            assert any(http.post(CHAT, json=ASK).status_code == 200 for _ in range(1000))
            engine.hangs = True


def test_lines_of_the_log(caplog):
    caplog.set_level(logging.DEBUG, logger="glm5")
    engine = scripted("</think>the secret answer")
    body = {"messages": [{"role": "user", "content": "my secret question"}]}
    with served(engine, key("alice")) as http:
        http.post(CHAT, json=body, headers=bearer("alice"))
        http.get("/a%0Ab?x=1", headers=bearer("alice"))
        http.get("/health")
    access = [record for record in caplog.records if record.name == "glm5.serve.http.access"]
    lines = [(one.levelname, *one.getMessage().rsplit(" ", 2), one.__dict__["tenant"]) for one in access]
    assert [(level, what, unit, tenant) for level, what, _, unit, tenant in lines] == [
        ("INFO", f"POST {CHAT} 200 alice", "s", "alice"),
        ("INFO", "GET /a%0Ab 404 alice", "s", "alice"),
        ("DEBUG", "GET /health 200", "s", ""),
    ]
    assert [float(line[2]) for line in lines] == [round(one.__dict__["seconds"], 3) for one in access]
    text = json.dumps([str(vars(record)) for record in caplog.records])
    assert "secret" not in text
    assert "alice" in text


def test_text_of_prompts_is_logged_only_if_asked_for(caplog):
    caplog.set_level(logging.INFO, logger="glm5")
    with served(scripted(), enable_log_requests=True) as http:
        http.post(CHAT, json={"messages": [{"role": "user", "content": "my secret question"}]})
    assert any("my secret question" in record.getMessage() for record in caplog.records)


def test_cors_is_off_unless_origins_are_named():
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    wants = asks | {"Access-Control-Request-Headers": "authorization,content-type"}
    with served(scripted()) as http:
        assert http.options(CHAT, headers=wants).status_code == 405
        answer = http.post(CHAT, json=ASK, headers={"Origin": "https://a.example"})
        assert not [name for name in answer.headers if name.startswith("access-control-")]
    with served(scripted(), key("alice"), allowed_origins=("https://a.example",)) as http:
        allowed = http.options(CHAT, headers=wants)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = http.options(CHAT, headers=wants | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = http.post(CHAT, json=ASK, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_bodies_that_are_too_large():
    with served(scripted(), max_body_bytes=1000) as http:
        large = {"messages": [{"role": "user", "content": "x" * 1000}]}
        answer = http.post(CHAT, json=large)
        assert (answer.status_code, code_of(answer)) == (413, "request_too_large")
        pieces = (b"x" * 100 for _ in range(20))
        answer = http.post(CHAT, content=pieces, headers={"content-type": "application/json"})
        assert (answer.status_code, code_of(answer)) == (413, "request_too_large")
        assert http.post(CHAT, json=ASK).status_code == 200


def test_bodies_that_do_not_come():
    with served(scripted(), client_timeout=1) as http:
        with socket.create_connection((http.base_url.host, http.base_url.port), timeout=SECONDS) as client:
            lines = [
                f"POST {CHAT} HTTP/1.1",
                "Host: localhost",
                "Content-Type: application/json",
                "Content-Length: 100",
            ]
            client.sendall("\r\n".join([*lines, "", '{"messages"']).encode())
            answer = client.makefile("rb").readline()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert http.post(CHAT, json=ASK).status_code == 200


def test_connections_end_whose_client_has_vanished():
    """The kernel sees to it; what is set on the listening socket holds for those it accepts."""
    from glm5.serve.http.server import bind

    with bind("127.0.0.1", 0, client_timeout=7.5) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7500


def test_random_bytes_at_every_route(keyed):
    noise = bytes(number * 37 % 256 for number in range(1000))
    before = threading.active_count()
    documents = [keyed.get(path, headers=bearer("boss")).json() for path in ("/openapi.json", "/admin/openapi.json")]
    for path in sorted({*documents[0]["paths"], *documents[1]["paths"], *OPEN, "/admin/openapi.json"}):
        for method in ("POST", "PUT"):
            answer = keyed.request(method, path, content=noise, headers=bearer("boss"))
            # SageMaker's probe may be a POST, and its body means nothing.
            right = (
                answer.status_code == 200 if (method, path) == ("POST", "/ping") else 400 <= answer.status_code < 500
            )
            assert right, (method, path, answer.status_code)
    assert keyed.get("/health_generate").status_code == 200
    assert threading.active_count() < before + 50  # a server's pool; not a thread for each request
