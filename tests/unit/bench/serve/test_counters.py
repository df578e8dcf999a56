"""Prometheus pages of servers, and what a run added to them."""

import pytest

from glm5.bench.serve.counters import Deltas, deltas, parse, read_counters, sglang_acceptance
from tests.support.scripted_server import plain
from tests.support.virtual_time import virtual_time
from tests.unit.bench.serve.running import client_of

BEFORE = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 600.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 200.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m, \\"x\\"",position="0"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 50.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
vllm:prefix_cache_queries_total{engine="0"} 1000.0
vllm:prefix_cache_hits_total{engine="0"} 10.0
glm5:prefix_cache_hit_tokens_total{tier="device"} 10.0
vllm:num_requests_running{engine="0"} 3.0
process_cpu_seconds_total 5.1
"""
AFTER = """vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 200.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 100.0 1395066363000
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 900
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 3.4e2
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 230.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 110.0
vllm:prefix_cache_queries{engine="0"} 1500.0
vllm:prefix_cache_hits_total{engine="0"} 210.0
glm5:prefix_cache_hit_tokens_total{tier="device"} 110.0
glm5:prefix_cache_hit_tokens_total{tier="host"} 100.0
vllm:num_preemptions_total NaN
"""


def test_the_difference_of_two_readings():
    more = deltas(parse(BEFORE), parse(AFTER))
    assert more.num_drafts == 100
    assert more.acceptance_length == pytest.approx(1 + 140 / 100)
    assert more.acceptance_rate == pytest.approx(140 / 300)
    assert more.per_position == pytest.approx((0.8, 0.6))
    assert (more.prefix_queries, more.prefix_hits) == (500, 200)
    assert more.hits_by_tier == {"device": 100, "host": 100}
    assert more.preemptions == 0


def test_what_a_server_does_not_count_is_none():
    assert deltas(None, parse(AFTER)) == deltas(parse(""), parse("")) == deltas({}, None) == Deltas()
    idle = deltas(parse(BEFORE), parse(BEFORE))
    assert (idle.num_drafts, idle.acceptance_length, idle.prefix_queries) == (0, None, 0)


def fetched(read, script):
    async def main():
        return await read(await client_of(lambda _: script))

    with virtual_time() as runner:
        return runner.run(main())


def test_pages_that_are_not_there():
    assert fetched(read_counters, plain(b"vllm:num_preemptions_total 2\n")) == {("vllm:num_preemptions", ""): 2.0}
    assert fetched(read_counters, plain({"detail": "Not Found"}, status=404)) is None


@pytest.mark.parametrize(
    ("info", "want"),
    [
        ({"internal_states": [{"avg_spec_accept_length": 3.5}]}, 3.5),
        ({"internal_states": [{}]}, None),
        ({"internal_states": [{"avg_spec_accept_length": None}]}, None),
        ([], None),
        (b"<html>", None),
    ],
)
def test_sglangs_own_account(info, want):
    assert fetched(sglang_acceptance, plain(info)) == want
    assert fetched(sglang_acceptance, plain(info, status=404)) is None
