"""Figures of runs against values computed by hand."""

import math
import statistics as textbook

import pytest

from glm5.bench.serve.api_formats import Usage
from glm5.bench.serve.load import CANCELLED, Outcome, Plan
from glm5.bench.serve.record import Record
from glm5.bench.serve.statistics import Times, is_good, summarize
from tests.support.scripted_server import completion
from tests.unit.bench.serve.running import run_virtually, single

EXACT = pytest.approx
PERCENTS = (50.0, 90.0, 99.0)


def record(sent, arrivals, *, prompt=10, **more):
    """A whole answer of a token a chunk."""
    given = {"end": arrivals[-1], "finish": "length", "counted": "chunk"} | more
    made = Record(sent=sent, usage=Usage(prompt, len(arrivals)), **given)
    made.arrivals.extend(arrivals)
    made.tokens.extend([1] * len(arrivals))
    return made


def outcome_of(records, *, end, clients=None, num=None, arrivals=None, **more):
    num = len(records) if num is None else num
    plan = Plan(single(num), arrivals or [0.0] * num, clients)
    return Outcome(plan, start=0.0, end=end, records=records, **more)


def summary(outcome, limits=None):
    return summarize(outcome, limits or {}, PERCENTS)


def test_percentiles_interpolate_between_ranks():
    # Of 1..5 s: rank 50 % is the third; 90 % lies 3.6 ranks up, so 4.6; 99 %: 3.96, so 4.96.
    times = Times.of([5.0, 1.0, 4.0, 2.0, 3.0], PERCENTS)
    assert times.percentiles == EXACT({50.0: 3000.0, 90.0: 4600.0, 99.0: 4960.0})
    assert (times.mean, times.std, times.max) == EXACT((3000.0, 1000 * math.sqrt(2), 5000.0))


def test_percentiles_are_the_textbooks(rng):
    values = [rng.expovariate(1.0) for _ in range(101)]
    cuts = textbook.quantiles(values, n=100, method="inclusive")
    found = Times.of(values, (50.0, 90.0, 99.0)).percentiles
    assert [found[p] for p in (50.0, 90.0, 99.0)] == EXACT([1000 * cuts[p - 1] for p in (50, 90, 99)])
    assert Times.of(values, ()).mean == EXACT(1000 * textbook.fmean(values))


def test_figures_of_three_requests():
    records = [
        record(1.0, [2.0, 3.0, 4.0]),  # TTFT 1, TPOT 1, E2E 3
        record(1.5, [3.5, 4.0, 4.5, 5.0, 5.5]),  # TTFT 2, TPOT 0.5, E2E 4
        record(5.0, [6.0], prompt=30),  # TTFT 1, no TPOT, E2E 1
    ]
    result = summary(outcome_of(records, end=9.0))
    assert (result.completed, result.failed, result.unfinished, result.duration) == (3, 0, 0, 8.0)
    assert (result.total_input_tokens, result.total_output_tokens) == (50, 9)
    assert result.request_throughput == EXACT(3 / 8)
    assert result.output_throughput == EXACT(9 / 8)
    assert result.total_token_throughput == EXACT(59 / 8)
    assert result.mean_concurrency == EXACT((3 + 4 + 1) / 8)
    assert result.peak_concurrency == 2
    assert result.times["ttft"].mean == EXACT(4000 / 3)
    assert (result.times["tpot"].num, result.times["tpot"].mean) == (2, EXACT(750.0))
    assert (result.times["itl"].num, result.times["itl"].mean) == (6, EXACT((2 * 1000 + 4 * 500) / 6))
    assert result.times["e2el"].percentiles[50.0] == EXACT(3000.0)
    assert result.speed_per_user == EXACT(1000 / 750)
    # Seconds after the first was sent: 1, 2, 3 | 2.5, 3, 3.5, 4, 4.5 | 5. The fourth second has 3, 3, 3.5.
    assert result.peak_output_throughput == 3.0
    assert (result.request_goodput, result.steady_output_throughput, result.first_wave) == (None, None, {})
    assert result.finish_reasons == {"length": 3}


def test_goodput_wants_every_limit():
    records = [record(0.0, [1.0, 2.0]), record(0.0, [0.5, 3.0]), record(0.0, [0.2])]
    goodput = {
        (): 3,
        (("ttft", 0.6),): 2,
        (("ttft", 0.5), ("tpot", 2.0)): 1,  # a limit kept to the point; one token has no TPOT and keeps any
        (("e2el", 2.0),): 2,
        (("ttft", 0.1),): 0,
    }
    for limits, num in goodput.items():
        assert sum(is_good(one, dict(limits)) for one in records) == num
    result = summary(outcome_of([*records, Record(error="timeout")], end=4.0), {"ttft": 0.6})
    assert result.request_goodput == EXACT(2 / 4)


def test_errors_count_by_kind_with_an_example_and_nowhere_else():
    failed = [Record(error="http 503", message=f"busy {k}") for k in range(3)]
    records = [record(0.0, [1.0, 2.0]), *failed, Record(error="timeout", message="t"), Record(error=CANCELLED)]
    result = summary(outcome_of(records, end=4.0, num=9, partial=True))
    assert result.errors == {"http 503": 3, "timeout": 1}
    assert result.error_examples == {"http 503": "busy 0", "timeout": "t"}
    assert (result.completed, result.failed, result.unfinished, result.partial) == (1, 4, 4, True)
    assert result.output_throughput == EXACT(2 / 4)


def test_nothing_answered():
    result = summary(outcome_of([Record(error="connect", message="refused")], end=1.0))
    assert (result.completed, result.failed, result.output_throughput, result.speed_per_user) == (0, 1, 0.0, 0.0)
    assert result.times["ttft"] == Times(percentiles=dict.fromkeys(PERCENTS, 0.0))


def test_the_first_wave_and_the_steady_part():
    # Two clients, five requests, TTFT 2 in the first wave and 1 after; 3 tokens, one a second. One client answers
    # at 2, 3, 4 | 5, 6, 7 | 8, 9, 10, the other at 2, 3, 4 | 5, 6, 7 and then has nothing to do.
    handler = iter([completion(2.0, [1.0, 1.0])] * 2 + [completion(1.0, [1.0, 1.0])] * 3)
    outcome = run_virtually(lambda _: next(handler), Plan(single(5), [0.0] * 5, clients=2))
    result = summary(outcome)
    assert (result.num_first_wave, result.duration) == (2, 10.0)
    assert result.first_wave["ttft"].mean == EXACT(2000.0)
    assert (result.later["ttft"].num, result.later["ttft"].mean) == (3, EXACT(1000.0))
    assert result.times["ttft"].mean == EXACT(1400.0)
    assert result.output_throughput == EXACT(15 / 10)
    assert result.steady_output_throughput == EXACT(6 / 3)  # from 4 to 7, both busy


def test_without_a_steady_part_there_is_no_figure_for_it():
    result = summary(run_virtually(lambda _: completion(1.0, [1.0]), Plan(single(3), [0.0] * 3, clients=2)))
    assert result.steady_output_throughput is None  # one client had nothing to do when the other began its second
    assert result.num_first_wave == 2
    alone = summary(run_virtually(lambda _: completion(1.0, [1.0]), Plan(single(2), [0.0] * 2, clients=2)))
    assert alone.steady_output_throughput is None
    assert alone.num_first_wave == 0


def test_acceptance_by_the_steps_of_answers():
    records = [record(0.0, [1.0, 2.0, 3.0]), record(0.0, [1.0, 2.0, 3.0, 4.0, 5.0])]
    for one, steps in zip(records, (2, 3), strict=True):
        one.usage = one.usage._replace(num_steps=steps, cached_tokens=4)
    result = summary(outcome_of(records, end=5.0))
    assert result.acceptance_length == EXACT(8 / 5)
    assert result.cached_tokens == 8


def test_a_busy_client_says_so():
    def warned(**more):
        outcome = outcome_of([record(0.0, [1.0, 2.0])], end=4.0, arrivals=[1.0])
        for name, value in more.items():
            if isinstance(value, list):
                getattr(outcome, name).extend(value)
            else:
                setattr(outcome, name, value)
        return summary(outcome).honesty

    assert not warned(lags=[0.001] * 99 + [0.004]).warnings
    assert "event loop was up to 30 ms late" in warned(lags=[0.0] * 90 + [0.03] * 10).warnings[0]
    assert "used 95% of a core" in warned(cpu_seconds=3.8).warnings[0]
    assert "sent up to 100 ms after their time" in warned(late=[0.1]).warnings[0]
    assert "waited for --max-concurrency" in warned(num_held=2).warnings[0]
    metrics = warned(lags=[0.002], cpu_seconds=0.4, num_chunks=1000)
    assert (metrics.lag_max, metrics.cpu, metrics.microseconds_per_chunk) == EXACT((2.0, 0.1, 400.0))


def test_answers_without_usage_are_named():
    outcome = outcome_of([record(0.0, [1.0], counted="guess")], end=1.0)
    assert "1 answers came without usage" in summary(outcome).honesty.warnings[0]
