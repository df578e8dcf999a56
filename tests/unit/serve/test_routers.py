"""What routers read of a server: loads, sources of KV events, rendered prompts, sessions, and vLLM's cache metrics."""

import json
import logging
import re

import pytest

from glm5.common.errors import EngineDead
from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.engine.transport.wire import KvEventSource
from glm5.serve.metrics.server_metrics import Rate
from glm5.serve.vllm.info import reachable
from tests.support import engines
from tests.support.models import random_model
from tests.support.serving import ASK, CHAT, bearer, key, scripted, served
from tests.support.tokenizers import tiny_tokenizer

# SGLang 0.5.23's fields of a load, and those that its router and SMG cannot do without.
CORE = {"dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens",
        "num_total_tokens", "num_active_tokens", "max_total_num_tokens", "max_running_requests", "token_usage",
        "gen_throughput", "cache_hit_rate", "utilization", "total_prefill_uncached_tokens", "total_prefill_busy_us",
        "decode_moments"}  # fmt: skip
SECTIONS = {"memory", "speculative", "disaggregation", "queues"}


@pytest.fixture(scope="module")
def server():
    engine = scripted()
    with served(engine) as http:
        yield http, engine


@pytest.fixture(scope="module")
def real():
    """A small model whose engine publishes events."""
    cfg = preset("tiny").replace(eos_token_id=tiny_tokenizer().eos_ids)
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "topic": "kv-events"}
    llm = LLM(random_model(11, cfg), tiny_tokenizer(), max_num_seqs=4, kv_events_config=events)
    with AsyncEngine(llm) as engine, served(engine) as http:
        yield http, engine


def test_loads(server):
    http, _ = server
    page = http.get("/v1/loads").raise_for_status().json()
    assert page.keys() == {"timestamp", "version", "accelerator", "num_accelerators", "loads"}
    (load,) = page["loads"]
    assert load.keys() == CORE | SECTIONS
    expected = {
        "dp_rank": 0,
        "num_running_reqs": 3,
        "num_waiting_reqs": 3,
        "num_waiting_uncached_tokens": 600,
        "num_used_tokens": 50 * 64,
        "num_total_tokens": 50 * 64 + 700,
        "max_total_num_tokens": 200 * 64,
        "max_running_requests": 8,
        "token_usage": 0.25,
        "cache_hit_rate": 0.321,
        "utilization": 0.375,
        "total_prefill_busy_us": 90000,
    }
    assert {name: load[name] for name in expected} == expected
    assert load["speculative"] == {"accept_length": 2.3, "accept_rate": pytest.approx(130 / 180, abs=1e-4)}
    assert load["queues"] == {"waiting": 3, "grammar": 1, "paused": 0, "retracted": 0}
    assert load["disaggregation"]["mode"] == "null"


@pytest.mark.parametrize(
    ("include", "sections"),
    [("core", set()), ("core,disagg,queues,memory", SECTIONS - {"speculative"}), ("spec, lora", {"speculative"})],
)
def test_sections_of_loads(server, include, sections):
    http, _ = server
    (load,) = http.get("/v1/loads", params={"include": include, "dp_rank": 0}).json()["loads"]
    assert load.keys() == CORE | sections


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"include": "core,quees"}, "include has 'quees'; allowed: core, memory, spec, lora, disagg, queues, all"),
        ({"dp_rank": 1}, "dp_rank is 1; allowed: 0, the only one"),
        ({"format": "xml"}, "format is 'xml'; allowed: json, prometheus"),
    ],
)
def test_wrong_queries_of_loads(server, query, message):
    answer = server[0].get("/v1/loads", params=query)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_loads_for_prometheus(server):
    text = server[0].get("/v1/loads", params={"format": "prometheus", "include": "core,spec,queues"}).text
    assert 'sglang_num_running_reqs{dp_rank="0"} 3\n' in text
    assert 'sglang_spec_accept_length{dp_rank="0"} 2.3\n' in text
    assert "# TYPE sglang_queues_waiting gauge\n" in text
    assert "decode_moments" not in text
    assert all(re.fullmatch(r'# TYPE \w+ gauge|\w+\{dp_rank="0"\} [\d.]+', line) for line in text.splitlines())


def test_loads_of_an_engine_that_is_gone():
    engine = scripted()
    with served(engine) as http:
        engine.refuses = EngineDead("it broke")
        answer = http.get("/v1/loads")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")


def test_loads_of_a_real_engine(real):
    http, engine = real
    http.post(CHAT, json=ASK | {"max_tokens": 20}).raise_for_status()
    (load,) = http.get("/v1/loads").json()["loads"]
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_waiting_uncached_tokens"] == 0
    assert load["max_total_num_tokens"] == 64 * engine.info.num_pages
    assert load["total_prefill_uncached_tokens"] > 0
    assert load["total_prefill_busy_us"] > 0
    count, sequences, micros, squares, products, tokens = load["decode_moments"]
    assert count == sequences == squares >= 1  # one request at a time
    assert products == micros > 0
    assert tokens >= count
    assert load["memory"]["token_capacity"] == load["max_total_num_tokens"]


def test_rate():
    rate = Rate()
    assert rate.value == 0
    rate.observe(100, 5.0)
    assert rate.value == 0
    for now in range(6, 40):
        rate.observe(100 + 7 * (now - 5), float(now))
    assert rate.value == pytest.approx(7)
    for now in range(40, 60):
        rate.observe(338, float(now))
    assert rate.value == 0
    rate.observe(3, 61.0)  # another engine
    rate.observe(5, 62.0)
    assert rate.value == 2


def test_load(server):
    http, engine = server
    engine.script = "well</think>yes"
    assert http.get("/load").json() == {"server_load": 0}
    engine.hangs = True
    engine.started.clear()
    with http.stream("POST", CHAT, json=ASK | {"stream": True}):
        assert engine.started.wait(20)
        assert http.get("/load").json() == {"server_load": 1}
        engine.release()


def test_sources_of_kv_events(server, real):
    assert server[0].get("/kv_event_sources").json() == []
    assert server[0].get("/server_info").json()["kv_events"] is None
    http, engine = real
    source = engine.info.kv_events
    told = {"data_parallel_rank": 0, "endpoint": source.endpoint, "replay_endpoint": None, "topic": "kv-events"}
    assert http.get("/kv_event_sources").json() == [told]
    info = http.get("/server_info").json()
    assert info["dp_size"] == 1
    assert info["kv_events"] == {
        "publisher": "zmq",
        "endpoint_host": "127.0.0.1",
        "endpoint_port_base": int(source.endpoint.rpartition(":")[2]),
        "topic": "kv-events",
        "block_size": 64,
        "dp_size": 1,
    }


def test_sources_on_all_addresses(monkeypatch):
    engine = scripted()
    engine.info = engines.ScriptedEngine.info.__class__(
        64, 9, 8, 9, 9, 0, 9, max_logprobs=20, routed_experts=False, table=[]
    )
    engine.info.kv_events = KvEventSource("tcp://0.0.0.0:5557", "tcp://[::]:5558", "")
    with served(engine) as http:
        (source,) = http.get("/kv_event_sources").json()
        assert (source["endpoint"], source["replay_endpoint"]) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
        assert http.get("/server_info").json()["kv_events"]["endpoint_host"] == "*"
        engine.info.kv_events = KvEventSource("ipc:///run/events", None, "")
        assert http.get("/kv_event_sources").json()[0]["endpoint"] == "ipc:///run/events"
        assert http.get("/server_info").json()["kv_events"] is None
    assert reachable("tcp://0.0.0.0:1", "::1") == "tcp://[::1]:1"
    assert reachable("tcp://10.0.0.1:1", "a") == "tcp://10.0.0.1:1"


def test_a_rendered_chat_is_the_prompt_that_is_computed(server):
    http, engine = server
    body = ASK | {"max_tokens": 5, "temperature": 0.5, "cache_salt": "x", "priority": 2, "top_k": 3}
    http.post(CHAT, json=body).raise_for_status()
    prompt_ids, num_submitted = engine.prompt_ids, engine.num_submitted
    request = http.post(f"{CHAT}/render", json=body).raise_for_status().json()
    assert engine.num_submitted == num_submitted, "nothing is generated"
    assert request["request_id"].startswith("chatcmpl-")
    assert request["token_ids"] == prompt_ids
    params = request["sampling_params"]
    assert (params["max_tokens"], params["temperature"], params["top_k"]) == (5, 0.5, 3)
    others = {"features": None, "model": "tiny", "stream": False, "stream_options": None, "cache_salt": "x",
              "priority": 2, "kv_transfer_params": None}  # fmt: skip
    assert {name: request[name] for name in others} == others
    assert request.keys() == others.keys() | {"request_id", "token_ids", "sampling_params"}


def test_rendered_completions(server):
    http, engine = server
    body = {"prompt": ["the answer", "is"], "max_tokens": 3, "stream": True}
    requests = http.post("/v1/completions/render", json=body).raise_for_status().json()
    assert [request["token_ids"] for request in requests] == [engine.tokenizer.encode(p) for p in body["prompt"]]
    assert [request["stream"] for request in requests] == [True, True]
    assert http.post("/v1/completions/render", json={"prompt": [[1, 2]]}).json()[0]["token_ids"] == [1, 2]
    wrong = http.post("/v1/completions/render", json={"prompt": "a", "max_tokens": -1})
    assert wrong.status_code == 400
    assert http.post(f"{CHAT}/render", json={"messages": "no"}).status_code == 400


def test_a_session_is_logged(caplog):
    # A line may be written after its answer has been read, but not after the server has ended.
    with caplog.at_level(logging.INFO, "glm5.serve.http.access"), served(scripted()) as http:
        http.post(CHAT, json=ASK, headers={"X-Session-ID": "s-17"}).raise_for_status()
        http.post(CHAT, json=ASK, headers={"X-Session-ID": "two words"}).raise_for_status()
    lines = [record for record in caplog.records if CHAT in record.getMessage()]
    assert " session s-17 " in lines[0].getMessage()
    assert lines[0].session == "s-17"
    assert "session" not in lines[1].getMessage()


def test_what_the_cache_is(server):
    text = server[0].get("/metrics").text
    labels = 'model_name="tiny",engine="0",block_size="64",num_gpu_blocks="200",cache_dtype="auto"'
    assert f"vllm:cache_config_info{{{labels}}} 1\n" in text
    assert 'vllm:gpu_prefix_cache_hit_rate{model_name="tiny",engine="0"} 0.321\n' in text


def test_figures_of_all_callers_need_the_role_metrics():
    with served(scripted(), key("alice"), key("bob"), key("grafana", role="metrics")) as http:
        for path in ("/v1/loads", "/load", "/kv_event_sources"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers=bearer("alice")).status_code == 403
            assert json.loads(http.get(path, headers=bearer("grafana")).text) is not None
