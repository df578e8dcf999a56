"""Two keys on a real engine: neither finds what the other's prompts have left in the cache, in any route."""

import httpx
import pytest

from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.serve.http.keys import KeyRing
from glm5.serve.http.server import bind, serving
from tests.support.models import random_model
from tests.support.serving import CHAT, SECONDS, bearer, key, make_app
from tests.support.tokenizers import tiny_tokenizer

LONG = "the quick brown fox jumps over the lazy dog " * 8  # several pages of the cache
MESSAGES = [{"role": "user", "content": LONG}]
KEYS = [key("alice"), key("bob"), key("carol", cache_salt="team"), key("dave", cache_salt="team")]


@pytest.fixture(scope="module")
def http():
    llm = LLM(random_model(11), tiny_tokenizer(), max_num_seqs=4)
    with AsyncEngine(llm) as engine:
        app = make_app(engine, *KEYS, key("boss", role="admin"))
        with serving(app, engine, bind("127.0.0.1", 0)) as url, httpx.Client(base_url=url, timeout=SECONDS) as http:
            yield http


def of_openai(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def of_anthropic(answer: dict) -> int:
    return answer["usage"]["cache_read_input_tokens"]


def of_responses(answer: dict) -> int:
    return answer["usage"]["input_tokens_details"]["cached_tokens"]


def of_sglang(answer: dict) -> int:
    return answer["meta_info"]["cached_tokens"]


# path, body, tokens that were found in the cache
ROUTES = [
    (CHAT, {"messages": MESSAGES, "max_tokens": 2}, of_openai),
    ("/v1/completions", {"prompt": LONG, "max_tokens": 2}, of_openai),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 16}, of_responses),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}, of_anthropic),
    ("/generate", {"text": LONG, "sampling_params": {"max_new_tokens": 2}}, of_sglang),
    (
        "/inference/v1/generate",
        {"token_ids": tiny_tokenizer().encode(LONG), "sampling_params": {"max_tokens": 2}},
        of_openai,
    ),
]


@pytest.fixture
def found(http, request):
    """found(name, **more): tokens of the route's prompt that the cache had. It is empty at first."""
    path, body, read = request.param
    assert http.post("/flush_cache", headers=bearer("boss")).status_code == 200

    def ask(name: str, **more) -> int:
        answer = http.post(path, json=body | more, headers=bearer(name))
        assert answer.status_code == 200, answer.text
        return read(answer.json())

    return ask


@pytest.mark.parametrize("found", ROUTES, indirect=True, ids=lambda route: route[0])
def test_a_key_finds_its_own_prompts_and_no_other_s(found):
    assert found("alice") == 0
    assert found("bob") == 0
    assert found("alice") >= 64
    assert found("bob") >= 64
    assert found("carol") == 0
    assert found("dave") >= 64  # of the same team
    assert found("boss") == 0


@pytest.mark.parametrize("found", [ROUTES[0], ROUTES[1]], indirect=True, ids=lambda route: route[0])
def test_no_salt_of_one_s_own_leads_to_another_s_prompts(found):
    salt = KeyRing(KEYS).find("alice").salt
    assert found("alice") == 0
    for own in (salt, f"{salt}/", f"/{salt}", "team", "shared:team", "/", "../alice"):
        assert found("bob", cache_salt=own) == 0
    assert found("bob", cache_salt=salt) >= 64
    assert found("alice", cache_salt="x") == 0


def test_what_one_key_asked_is_seen_nowhere_by_another(http):
    """Neither its text nor its id, in anything that can be asked for."""
    marked = {"messages": [{"role": "user", "content": "a-secret-mark"}], "max_tokens": 2}
    headers = bearer("alice") | {"X-Request-Id": "a-secret-mark"}
    requested = http.post(CHAT, json=marked, headers=headers)
    secrets = ["a-secret-mark", "alice", requested.json()["id"]]
    document = http.get("/openapi.json").json()
    paths = [path for path, operations in document["paths"].items() if "get" in operations and "{" not in path]
    assert "/v1/models" in paths
    for path in [*paths, "/metrics", "/get_server_info"]:
        text = http.get(path, headers=bearer("bob")).text
        assert not any(secret in text for secret in secrets), path
