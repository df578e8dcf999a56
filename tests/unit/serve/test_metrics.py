"""The page of metrics: the format, the names, and figures that are those of the requests that were made."""

import re
from pathlib import Path

import pytest

from glm5.bench.serve.counters import parse
from glm5.common.errors import EngineDead
from glm5.engine.frontend.outputs import Delta
from glm5.serve.metrics.prometheus import Page
from glm5.serve.metrics.server_metrics import RequestMetrics, ServerMetrics
from tests.support.serving import ASK, CHAT, bearer, key, scripted, served

REPO = Path(__file__).parents[3]
SAMPLE = re.compile(
    r'^[a-z_:\d]+(?:_bucket|_sum|_count)?(?:\{(?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*\})? [-+.\deInf]+$'
)


def values(page: str, name: str) -> dict[str, float]:
    """{labels: value} of a metric, without the labels that all have."""
    found = re.findall(rf'^{re.escape(name)}\{{model_name="tiny",engine="0",?(.*)\}} (\S+)$', page, flags=re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def test_the_text_format():
    page = Page({"model_name": 'a"b\\c\nd'})
    counter = page.counter("c_total", "Counts.", "who")
    page.gauge("g", "Goes.").set(0.25)
    histogram = page.histogram("h", "Spreads.", [0.5, 1, 10])
    counter.add(2, "x")
    counter.add(1, "\udcff")
    for value in (0.5, 0.75, 1.0, 100.0):
        histogram.observe(value)
    label = 'model_name="a\\"b\\\\c\\nd"'
    assert page.text().splitlines() == [
        "# HELP c_total Counts.",
        "# TYPE c_total counter",
        f'c_total{{{label},who="x"}} 2',
        f'c_total{{{label},who="?"}} 1',
        "# HELP g Goes.",
        "# TYPE g gauge",
        f"g{{{label}}} 0.25",
        "# HELP h Spreads.",
        "# TYPE h histogram",
        f'h_bucket{{{label},le="0.5"}} 1',
        f'h_bucket{{{label},le="1"}} 3',
        f'h_bucket{{{label},le="10"}} 3',
        f'h_bucket{{{label},le="+Inf"}} 4',
        f"h_sum{{{label}}} 102.25",
        f"h_count{{{label}}} 4",
    ]


def test_the_figures_of_a_server():
    engine = scripted("</think>four")
    num_tokens = len(engine.tokenizer.encode(engine.script))
    with served(engine) as http:
        for _ in range(3):
            assert http.post(CHAT, json=ASK).status_code == 200
        num_prompt = len(engine.prompt_ids)
        page = http.get("/metrics")
        assert http.get("/nowhere/at/all").status_code == 404
        later = http.get("/metrics").text
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert all(line.startswith("# ") or SAMPLE.match(line) for line in page.text.splitlines())
    text = page.text
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 1000,
        "vllm:prefix_cache_hits_total": 321,
        "vllm:num_preemptions_total": 1,
        "vllm:prompt_tokens_total": 3 * num_prompt,
        "vllm:generation_tokens_total": 3 * num_tokens,
        "vllm:time_to_first_token_seconds_count": 3,
        "vllm:inter_token_latency_seconds_count": 3 * (num_tokens - 1),
        "vllm:request_time_per_output_token_seconds_count": 3,
        "vllm:e2e_request_latency_seconds_count": 3,
        "vllm:spec_decode_num_drafts_total": 100,
        "vllm:spec_decode_num_draft_tokens_total": 180,
        "vllm:spec_decode_num_accepted_tokens_total": 130,
        "glm5:weight_version": 4,
        "glm5:engine_up": 1,
    }
    assert {name: values(text, name)[""] for name in expected} == expected
    finished = values(text, "vllm:request_success_total")
    assert {label: count for label, count in finished.items() if count} == {'finished_reason="stop"': 3}
    assert values(text, "glm5:prefix_cache_hit_tokens_total") == {
        'tier="device"': 300,
        'tier="host"': 20,
        'tier="disk"': 1,
    }
    assert values(text, "glm5:kv_tier_damaged_pages_total") == {'tier="host"': 2, 'tier="disk"': 5}
    assert values(text, "vllm:spec_decode_num_accepted_tokens_per_pos_total") == {
        'position="0"': 90,
        'position="1"': 40,
    }
    # Paths that nobody serves are one line, however many there are.
    assert values(later, "http_requests_total")['method="GET",handler="none",status="4xx"'] == 1
    assert values(later, "http_requests_total")[f'method="POST",handler="{CHAT}",status="2xx"'] == 3
    # What the load generator reads of it.
    assert parse(text)["vllm:spec_decode_num_accepted_tokens_per_pos", "1"] == 40


def test_tokens_are_booked_on_the_key_that_asked():
    engine = scripted("</think>ok")
    with served(engine, key("alice"), key("bob"), key("boss", role="admin")) as http:
        for name, times in (("alice", 1), ("bob", 2)):
            for _ in range(times):
                assert http.post(CHAT, json=ASK, headers=bearer(name)).status_code == 200
        assert http.post(CHAT, json=ASK).status_code == 401
        page = http.get("/metrics", headers=bearer("boss")).text
    # A refused request counts for its route too.
    assert values(page, "http_requests_total")[f'method="POST",handler="{CHAT}",status="4xx"'] == 1
    num_tokens = len(engine.tokenizer.encode(engine.script))
    booked = values(page, "glm5:key_tokens_total")
    assert booked['key="alice",kind="generation"'] == num_tokens
    assert booked['key="bob",kind="generation"'] == 2 * num_tokens
    assert booked['key="bob",kind="prompt"'] == 2 * booked['key="alice",kind="prompt"'] > 0


def test_every_counter_begins_at_zero_and_every_metric_is_documented():
    """A rate or an alert needs the count before the first one."""
    documented = re.findall(
        r"`((?:vllm|glm5):\w+|http_requests_total)[`{]", (REPO / "docs/operations.md").read_text(encoding="utf-8")
    )
    with served(scripted(), key("alice"), key("boss", role="admin")) as http:
        page = http.get("/metrics", headers=bearer("boss")).text
    exported = re.findall(r"^# TYPE (\S+) (\S+)$", page, flags=re.MULTILINE)
    assert set(documented) == {name for name, _ in exported}
    for name, kind in exported:
        assert kind != "counter" or values(page, name), f"{name} is absent before it first counts"
    assert values(page, "glm5:key_tokens_total")['key="alice",kind="prompt"'] == 0
    assert values(page, "http_requests_total")[f'method="POST",handler="{CHAT}",status="5xx"'] == 0


def test_refusals_are_counted_under_codes_that_begin_at_zero():
    codes = set(values(ServerMetrics("tiny").page.text(), "glm5:requests_refused_total"))
    busy = key("busy", requests_per_minute=1)
    with served(scripted(), busy, key("boss", role="admin"), allowed_hosts=("localhost", "127.0.0.1")) as http:
        for headers in (bearer("busy"), bearer("busy"), bearer("other"), {"Host": "evil.example"}):
            http.post(CHAT, json=ASK, headers=headers)
        http.post("/flush_cache", headers=bearer("busy"))
        http.get("/sessions/%20/v1/models", headers=bearer("busy"))
        later = set(values(http.get("/metrics", headers=bearer("boss")).text, "glm5:requests_refused_total"))
    assert later == codes


def test_an_engine_that_is_gone_leaves_the_last_counts():
    engine = scripted()
    with served(engine) as http:
        before = http.get("/metrics").text
        engine.refuses = EngineDead("it broke")
        engine.stopped_because = "it broke"
        after = http.get("/metrics").text
    assert values(before, "glm5:engine_up")[""] == 1
    assert values(after, "glm5:engine_up")[""] == values(after, "vllm:num_requests_running")[""] == 0
    assert values(after, "vllm:prefix_cache_hits_total") == values(before, "vllm:prefix_cache_hits_total")


@pytest.fixture
def metrics():
    return ServerMetrics("tiny")


def buckets(metrics, histogram) -> list[float]:
    """Upper bounds of the buckets that the observations fell into."""
    lines = [line.rsplit(" ", 1) for line in histogram.lines({}, histogram.totals()) if "_bucket" in line]
    counts = [int(count) for _, count in lines]
    grown = [count - before for count, before in zip(counts, [0, *counts], strict=False)]
    bounds = [float(line.split('le="')[1].split('"')[0]) for line, _ in lines]
    return [bound for bound, count in zip(bounds, grown, strict=True) for _ in range(count)]


def test_times_of_one_request(metrics, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("glm5.serve.metrics.server_metrics.time.monotonic", lambda: clock[0])
    measured = RequestMetrics(metrics, "", 10, 2)
    measured.add(Delta((1,), (), arrived=100.9, queued_s=0.45))  # first token after 0.9 s
    measured.add(Delta((2, 3), (), arrived=101.05, index=1))
    measured.add(Delta((4, 5, 6), (), "stop", arrived=101.5))  # three tokens, 0.6 s after the one before
    measured.add(Delta((), (), "length", index=1, arrived=102.0))
    measured.ended("abort")
    assert buckets(metrics, metrics.first_token) == [1.0]
    assert buckets(metrics, metrics.queued) == buckets(metrics, metrics.prefill) == [0.5]
    assert buckets(metrics, metrics.inter_token) == [0.75]
    assert buckets(metrics, metrics.per_token) == [0.001, 0.2]  # of the second, all came at once
    assert buckets(metrics, metrics.latency) == [1.5]
    assert metrics.latency.sum == pytest.approx(1.5)
    assert metrics.generated.value() == 6
    assert [metrics.finished.value(reason) for reason in ("stop", "length", "abort")] == [1, 1, 0]


def test_a_request_that_is_left(metrics):
    measured = RequestMetrics(metrics, "alice", 10, 3)
    measured.add(Delta((1,), (), "stop", arrived=1e9))
    measured.add(Delta((2, 3), (), index=1, arrived=1e9))
    assert metrics.tenant_tokens.value("alice", "generation") == 3  # while it runs: this process may be killed
    measured.ended("abort")
    assert [metrics.finished.value(reason) for reason in ("stop", "length", "abort")] == [1, 0, 2]
    assert metrics.answer_lengths.count == 3
    assert metrics.tenant_tokens.value("alice", "generation") == 3
