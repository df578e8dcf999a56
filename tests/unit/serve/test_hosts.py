"""Under which names a server may be asked, with keys and without."""

import socket
from contextlib import nullcontext

import pytest

from glm5.serve.http.errors import ApiError
from glm5.serve.http.hosts import Hosts
from tests.support.serving import ASK, CHAT, bearer, key, scripted, served

# Host, whether it is one of the server's without keys, and with --allowed-hosts llm.example *.lan
NAMES = [
    ("localhost", True, True),
    ("LocalHost.:8000", True, True),
    ("chat.localhost:8000", True, True),
    ("127.0.0.1:1", True, True),
    ("127.8.8.8", True, True),
    ("192.168.1.5:8000", True, True),
    ("[::1]:8000", True, True),
    ("[::1]", True, True),
    ("[2001:db8::5]:80", True, True),
    ("", True, True),
    ("own-name:8000", True, True),
    ("evil.example", False, False),
    ("evil.example:8000", False, False),
    ("localhost.evil.example", False, False),
    ("127.0.0.1.evil.example", False, False),
    ("evillocalhost", False, False),
    ("llm.example", False, True),
    ("LLM.example.:443", False, True),
    ("a.llm.example", False, False),
    ("b.a.lan", False, True),
    ("lan", False, False),
    ("::1", False, False),
    ("[evil.example]", False, False),
    (":80", False, False),
    ("localhost@evil.example", False, False),
    ("localhost:80@evil.example", False, False),
    ("[::1].evil.example", False, False),
    ("127.0.0.1:evil.example", False, False),
]


@pytest.mark.parametrize(("host", "is_own", "is_told"), NAMES)
def test_names(host, is_own, is_told):
    for hosts, is_good in ((Hosts(["own-name"]), is_own), (Hosts(["llm.example.", "*.LAN", "own-name"]), is_told)):
        with nullcontext() if is_good else pytest.raises(ApiError, match="--allowed-hosts"):
            hosts.check(host)


def test_without_keys_a_server_is_asked_under_its_own_names():
    """Another name is that of a page that would read what is not meant for it."""
    with served(scripted(), host="own-name") as http:
        for path in ("/", "/health", "/v1/models", "/nowhere"):
            for host, status in (("own-name", 404 if path == "/nowhere" else 200), ("evil.example", 421)):
                assert http.get(path, headers={"Host": host}).status_code == status
        answer = http.post(CHAT, json=ASK, headers={"Host": "evil.example"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (421, "unknown_host")
    assert "'evil.example'; allowed: localhost, an IP address, or" in error["message"]
    assert answer.headers["x-request-id"]


def test_all_names_are_good_with_keys_or_if_told():
    foreign = {"Host": "llm.example"}
    with served(scripted(), key("alice")) as http:
        assert http.get("/v1/models", headers=foreign | bearer("alice")).status_code == 200
    with served(scripted(), key("alice"), allowed_hosts=("other.example",)) as http:
        assert http.get("/v1/models", headers=foreign | bearer("alice")).status_code == 421
    with served(scripted(), allowed_hosts=("*",)) as http:
        assert http.get("/v1/models", headers=foreign).status_code == 200
    with served(scripted(), key("boss", role="admin")) as http:  # which opens the API to all
        assert http.get("/v1/models", headers=foreign).status_code == 421


def test_a_page_that_may_call_learns_why_it_is_refused():
    with served(scripted(), allowed_origins=("https://a.example",)) as http:
        refused = http.post(CHAT, json=ASK, headers={"Origin": "https://a.example", "Host": "b.example"})
    assert refused.status_code == 421
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_no_host_at_all_is_allowed_where_http_allows_it():
    with served(scripted()) as http, socket.create_connection((http.base_url.host, http.base_url.port)) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("path", ["/health/", "/metrics/", "/v1/chat/completions/", "/page/"])
def test_nothing_leads_elsewhere(path):
    with served(scripted(), allowed_hosts=("*",)) as http:
        for method in ("GET", "POST"):
            answer = http.request(method, path, headers={"Host": "evil.example"})
            assert answer.status_code == 404
            assert "location" not in answer.headers
