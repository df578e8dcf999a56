"""Requests that trainers and environments sent to a server, as recorded, and how each reads the answers.

`tests/data/trainer_requests.json` has the requests of unmodified clients: of verifiers during an episode of two turns,
of TRL's client of vLLM and its asynchronous worker, and of the probe by which OpenEnv grades a server.
`tests/soak/test_trainer_clients.py` runs the clients themselves.
"""

import json
import math
from pathlib import Path

import httpx
import pytest

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.config.presets import preset
from glm5.config.serve import ServeConfig
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.serve.app import create_app
from glm5.serve.http.server import bind, serving
from tests.support.models import random_model

REPO = Path(__file__).parents[3]
REQUESTS = json.loads((REPO / "tests/data/trainer_requests.json").read_text(encoding="utf-8"))
SENTINEL = -9999.0


@pytest.fixture(scope="module")
def url():
    """A tiny random model with the vocabulary of the one that the clients were recorded with."""
    tokenizer = Tokenizer.from_dir(REPO / "models/mini")
    cfg = preset("tiny").replace(vocab_size=2048, eos_token_id=tokenizer.eos_ids)
    config = ServeConfig.model_validate(
        {
            "model": "org/tiny",
            "served_model_name": ("policy",),
            "logprobs_mode": "processed_logprobs",
            "enable_return_routed_experts": True,
        }
    )
    llm = LLM(random_model(11, cfg), tokenizer, max_num_seqs=4, enable_return_routed_experts=True)
    with AsyncEngine(llm) as engine:
        app = create_app(engine, ChatTemplate.bundled("glm-5.1", tokenizer), tokenizer, config)
        with serving(app, engine, bind("127.0.0.1", 0)) as url:
            yield url


def exchanges(http, client, path):
    """(body, answer) of a client's recorded requests to a route."""
    found = []
    for request in REQUESTS:
        if request["client"].startswith(client) and request["path"].partition("?")[0] == path:
            body = request["body"]
            if body is not None and "max_tokens" in body:  # one asks for 512, of which nothing depends on the last
                body |= {"max_tokens": min(8, body["max_tokens"])}
            answer = http.request(request["method"], request["path"], json=body, headers=request["headers"])
            assert answer.status_code == 200, answer.text
            found.append((body, answer.json() if answer.content else None))
    assert found, (client, path)
    return found


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def assert_named(token_ids, content):
    """Ids and log-probabilities pair by place and by name."""
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in token_ids]
    assert_sampled([entry["logprob"] for entry in content])


def assert_sampled(values):
    assert all(type(value) is float and math.isfinite(value) and SENTINEL < value <= 0 for value in values)


def test_every_recorded_request_is_read_by_a_test():
    assert {request["client"].partition(" ")[0] for request in REQUESTS} == {"verifiers", "TRL", "OpenEnv"}
    routes = {(request["client"].partition(" ")[0], request["path"].partition("?")[0]) for request in REQUESTS}
    assert routes == {
        ("verifiers", "/v1/models"), ("verifiers", "/inference/v1/generate"),
        ("TRL", "/health"), ("TRL", "/v1/models"), ("TRL", "/server_info"), ("TRL", "/v1/completions"),
        ("TRL", "/v1/chat/completions"),
        ("OpenEnv", "/v1/models"), ("OpenEnv", "/v1/chat/completions"),
    }  # fmt: skip


def test_verifiers(http):
    [(_, models)] = exchanges(http, "verifiers", "/v1/models")
    assert [card["max_model_len"] for card in models["data"] if card["id"] == "policy"] == [1024]
    turns = exchanges(http, "verifiers", "/inference/v1/generate")
    assert len(turns) == 2
    for body, answer in turns:
        [choice] = answer["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        assert_named(choice["token_ids"], choice["logprobs"]["content"])
        # Rows go to the tokens from `start` on; the last token has none.
        routed, start = choice["routed_experts"], body["sampling_params"].get("routed_experts_prompt_start", 0)
        assert routed["start"] == start
        assert routed["shape"][0] == len(body["token_ids"]) + len(choice["token_ids"]) - 1 - start
        assert (routed["dtype"], next(iter(routed))) == ("uint8", "data")
    assert turns[1][0]["sampling_params"]["routed_experts_prompt_start"] > 0, "the turn continues the one before"


def test_trl(http):
    for path in ("/health", "/v1/models"):
        exchanges(http, "TRL", path)
    [(_, info)] = exchanges(http, "TRL", "/server_info")
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
    for body, answer in exchanges(http, "TRL", "/v1/completions"):
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices, n = answer["choices"], body.get("n", 1)
        assert len(choices) == n * len(prompts)
        for number, choice in enumerate(choices):
            if "prompt_logprobs" in body:
                rows = zip(prompts[number], choice["prompt_logprobs"], strict=True)
                assert all(row is None or str(token_id) in row for token_id, row in rows)
                continue
            assert choice["prompt_token_ids"] == prompts[number // n]
            told = choice["logprobs"]
            if body["logprobs"] is None:
                assert told is None
                continue
            if "return_tokens_as_token_ids" in body:
                assert told["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
            assert len(told["top_logprobs"]) == len(told["token_logprobs"]) == len(choice["token_ids"])
            assert_sampled(told["token_logprobs"])
    for body, answer in exchanges(http, "TRL", "/v1/chat/completions"):
        assert len(answer["choices"]) == body["n"]
        for choice in answer["choices"]:
            assert_named(choice["token_ids"], choice["logprobs"]["content"])
            assert all("top_logprobs" in entry for entry in choice["logprobs"]["content"])
            assert choice["prompt_token_ids"] == answer["prompt_token_ids"]


def test_openenv_grades_tokens_and_processed(http):
    exchanges(http, "OpenEnv", "/v1/models")
    (_, first), (_, with_tools), (_, cool), (_, hot) = exchanges(http, "OpenEnv", "/v1/chat/completions")
    [choice] = first["choices"]
    assert first["prompt_token_ids"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0
    assert_sampled([entry["logprob"] for entry in choice["logprobs"]["content"]])
    assert with_tools["choices"][0]["message"]["role"] == "assistant"
    gaps = []
    for answer in (cool, hot):
        values = [top["logprob"] for top in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        gaps.append(values[0] - values[1])
    assert gaps[1] / gaps[0] == pytest.approx(0.5, abs=0.01), "the temperatures are 1 and 2"
