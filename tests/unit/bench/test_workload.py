"""The workload: the same everywhere for one seed, within its bounds, and measured as it says."""

import pytest

from glm5.bench.run import Answer, Run, num_equal
from glm5.bench.workload import OUTPUT_LENGTHS, PROMPT_LENGTHS, draw_jobs


def test_one_seed_is_one_workload():
    jobs = draw_jobs(40, 0, range(1000))
    assert jobs == draw_jobs(40, 0, range(1000))
    assert jobs[:7] == draw_jobs(7, 0, range(1000))
    assert not set(jobs) & set(draw_jobs(40, 1, range(1000)))
    # What was published with these lengths must not move.
    assert [(len(job.prompt_ids), job.num_output) for job in jobs[:3]] == [(105, 48), (51, 111), (62, 113)]
    assert jobs[0].prompt_ids[:4] == (813, 905, 170, 435)


def test_lengths_are_mixed_within_the_bounds():
    jobs = draw_jobs(2000, 0, range(10, 20))
    for lengths, (least, most) in (
        ([len(job.prompt_ids) for job in jobs], PROMPT_LENGTHS),
        ([job.num_output for job in jobs], OUTPUT_LENGTHS),
    ):
        assert (min(lengths), max(lengths)) == (least, most)
        assert abs(sum(lengths) / len(lengths) - (least + most) / 2) < 5
    assert {token_id for job in jobs for token_id in job.prompt_ids} == set(range(10, 20))


def test_figures_by_hand():
    run = Run([Answer((1, 2, 3), 10.0, 10.5, 12.5), Answer((4, 5), 10.0, 11.0, 11.5)], 2.5)
    metrics = run.metrics()
    assert (metrics["tokens_per_second"], metrics["output_tokens"]) == (2.0, 5)
    assert (metrics["ttft_ms"], metrics["p50_ttft_ms"], metrics["p99_ttft_ms"]) == pytest.approx((750, 750, 995))
    assert (metrics["tpot_ms"], metrics["p50_tpot_ms"], metrics["p99_tpot_ms"]) == pytest.approx((750, 750, 995))
    other = Run([Answer((1, 2, 3), 0.0, 1.0, 2.0), Answer((4, 6), 0.0, 1.0, 2.0)], 2.0)
    assert num_equal(run, other) == 1
