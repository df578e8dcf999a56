"""Statistics of a run, from the records of its requests. Only requests with a complete answer count.

    output tok/s        tokens of complete answers / duration; duration is from the first request sent to the last end
    steady tok/s        closed load only: tokens that arrived while every client was busy and past its first request
    goodput             requests within all limits / duration
    concurrency         mean number of running requests: sum of E2E / duration
    peak tok/s          most tokens in one second of the run

Percentiles interpolate linearly between ranks, as numpy and vLLM do.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from glm5.bench.serve.counters import Deltas
from glm5.bench.serve.load import CANCELLED, Outcome
from glm5.bench.serve.record import Record

MAX_LAG, MAX_CPU, MAX_LATE = 0.010, 0.80, 0.050  # seconds, share of a core, seconds


@dataclass(frozen=True)
class Times:
    """Statistics of one metric over a set of requests, in milliseconds. Without values (`num` 0) all others are 0."""

    num: int = 0
    mean: float = 0.0
    std: float = 0.0
    max: float = 0.0
    percentiles: Mapping[float, float] = field(default_factory=dict[float, float])

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> "Times":
        if not len(seconds):
            return cls(percentiles=dict.fromkeys(percentiles, 0.0))
        values = np.asarray(seconds) * 1000
        ranks = np.percentile(values, percentiles).tolist()
        found = dict(zip(percentiles, ranks, strict=True))
        return cls(len(values), float(values.mean()), float(values.std()), float(values.max()), found)


@dataclass(frozen=True)
class ClientOverhead:
    """Overhead of the client itself. Lag and lateness in milliseconds; CPU as a share of one core.

    `warnings`: sentences about overhead that makes results unreliable.
    """

    lag_p99: float
    lag_max: float
    late_p99: float
    late_max: float
    cpu: float
    microseconds_per_chunk: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """Results of one run. Times by metric: of all requests, of the first wave, and of later ones."""

    clients: int | None
    partial: bool
    duration: float
    completed: int
    failed: int
    unfinished: int
    errors: Mapping[str, int]
    error_examples: Mapping[str, str]
    finish_reasons: Mapping[str, int]
    total_input_tokens: int
    total_output_tokens: int
    cached_tokens: int | None
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    steady_output_throughput: float | None
    peak_output_throughput: float
    mean_concurrency: float
    peak_concurrency: int
    times: Mapping[str, Times]
    first_wave: Mapping[str, Times]
    later: Mapping[str, Times]
    num_first_wave: int
    tokens_counted_by: Mapping[str, int]
    num_held: int
    honesty: ClientOverhead
    server: Deltas
    steps_acceptance: float | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step, by the server's counters or by the steps that its answers report."""
        return self.server.acceptance_length or self.steps_acceptance

    @property
    def speed_per_user(self) -> float:
        """Tokens per second of one answer after the first token: 1 / mean TPOT."""
        mean = self.times["tpot"].mean
        return 1000 / mean if mean else 0.0


def summarize(
    outcome: Outcome, limits: Mapping[str, float], percentiles: Sequence[float], server: Deltas | None = None
) -> Result:
    """The results of a run. `limits`: seconds by metric, for goodput."""
    complete = [record for record in outcome.records if record.error is None]
    failed = [record for record in outcome.records if record.error not in (None, CANCELLED)]
    first = [record for record in complete if record.first_wave]
    start = min((record.sent for record in outcome.records), default=outcome.start)
    duration = max(outcome.end - start, 1e-9)
    num_output = sum(record.num_tokens for record in complete)
    num_input = sum(record.usage.prompt_tokens or 0 for record in complete)
    cached = [record.usage.cached_tokens for record in complete if record.usage.cached_tokens is not None]
    num_good = sum(is_good(record, limits) for record in complete)
    return Result(
        clients=outcome.plan.clients,
        partial=outcome.partial,
        duration=duration,
        completed=len(complete),
        failed=len(failed),
        unfinished=outcome.plan.num_requests - len(complete) - len(failed),
        errors=dict(Counter(str(record.error) for record in failed).most_common()),
        error_examples={str(record.error): record.message for record in reversed(failed)},
        finish_reasons=dict(Counter(str(record.finish) for record in complete).most_common()),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        cached_tokens=sum(cached) if cached else None,
        request_throughput=len(complete) / duration,
        request_goodput=num_good / duration if limits else None,
        output_throughput=num_output / duration,
        total_token_throughput=(num_input + num_output) / duration,
        steady_output_throughput=_steady(outcome),
        peak_output_throughput=_peak(complete, start),
        mean_concurrency=sum(record.latency for record in complete) / duration,
        peak_concurrency=_most_at_once(complete),
        times=_times(complete, percentiles),
        first_wave=_times(first, percentiles) if first else {},
        later=_times([record for record in complete if not record.first_wave], percentiles) if first else {},
        num_first_wave=len(first),
        tokens_counted_by=dict(Counter(record.counted for record in complete).most_common()),
        num_held=outcome.num_held,
        honesty=_client_overhead(outcome, complete),
        server=server or Deltas(),
        steps_acceptance=_tokens_a_step(complete),
    )


def is_good(record: Record, limits: Mapping[str, float]) -> bool:
    """Whether a request is within every limit. An answer of one token has no TPOT and meets any limit of it."""
    taken = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(taken[name] <= limit for name, limit in limits.items())


def _times(records: Sequence[Record], percentiles: Sequence[float]) -> dict[str, Times]:
    each: dict[str, Callable[[Record], Iterable[float]]] = {
        "ttft": lambda record: [record.ttft],
        "tpot": lambda record: [] if record.tpot is None else [record.tpot],
        "itl": Record.itl,
        "gap": Record.gaps,
        "e2el": lambda record: [record.latency],
    }
    return {name: Times.of([x for record in records for x in of(record)], percentiles) for name, of in each.items()}


def _steady(outcome: Outcome) -> float | None:
    """Tokens per second from the end of the first wave to when the first client has no more requests."""
    plan = outcome.plan
    if not plan.has_waves or plan.clients is None:
        return None
    complete = [record for record in outcome.records if record.error is None]
    ends_of_first = [record.end for record in complete if record.first_wave]
    last_start = max(record.sent for record in outcome.records if record.turn == 0)
    ends: dict[int, float] = {}
    for record in complete:
        ends[record.conversation] = max(record.end, ends.get(record.conversation, 0.0))
    stops = [end for end in ends.values() if end >= last_start]
    if not ends_of_first or not stops or min(stops) <= max(ends_of_first):
        return None
    begin, stop = max(ends_of_first), min(stops)
    num = sum(
        n for record in complete for at, n in zip(record.arrivals, record.tokens, strict=True) if begin < at <= stop
    )
    return num / (stop - begin)


def _peak(records: Sequence[Record], start: float) -> float:
    if not records:
        return 0.0
    seconds = np.concatenate([np.asarray(record.arrivals) for record in records]) - start
    tokens = np.concatenate([np.asarray(record.tokens) for record in records])
    return float(np.bincount(seconds.clip(0).astype(int), weights=tokens).max())


def _most_at_once(records: Sequence[Record]) -> int:
    # Ends sort before starts at the same time: a client starts when its last request has ended.
    steps = sorted([(record.sent, 1) for record in records] + [(record.end, -1) for record in records])
    return max(np.cumsum([step for _, step in steps]).tolist(), default=0)


def _tokens_a_step(records: Sequence[Record]) -> float | None:
    stepped = [record for record in records if record.usage.num_steps]
    steps = sum(record.usage.num_steps or 0 for record in stepped)
    return sum(record.num_tokens for record in stepped) / steps if steps else None


def _client_overhead(outcome: Outcome, records: Sequence[Record]) -> ClientOverhead:
    lags = Times.of(outcome.lags, (99.0,))
    late = Times.of(outcome.late if not outcome.plan.is_closed else [], (99.0,))
    seconds = max(outcome.end - outcome.start, 1e-9)
    cpu = outcome.cpu_seconds / seconds
    warnings: list[str] = []
    if lags.percentiles[99.0] > MAX_LAG * 1000:
        warnings.append(
            f"the client's event loop was up to {lags.percentiles[99.0]:.0f} ms late (p99): times are too long by as "
            "much; run the client on a machine of its own, or split the load over several"
        )
    if cpu > MAX_CPU and seconds > 1:
        warnings.append(f"the client used {cpu:.0%} of a core, all that it can: the server may be faster than measured")
    if late.percentiles[99.0] > MAX_LATE * 1000:
        warnings.append(f"requests were sent up to {late.percentiles[99.0]:.0f} ms after their time (p99)")
    guessed = sum(record.counted == "guess" for record in records)
    if guessed:
        warnings.append(f"{guessed} answers came without usage: each chunk was taken for one token")
    if empty := sum(record.num_tokens == 0 for record in records):
        warnings.append(f"{empty} answers had no token: their first is taken to have come with their end")
    if outcome.num_held:
        warnings.append(
            f"{outcome.num_held} requests waited for --max-concurrency, which no latency includes: "
            "the load was not fully open"
        )
    per_chunk = outcome.cpu_seconds / outcome.num_chunks * 1e6 if outcome.num_chunks else 0.0
    return ClientOverhead(
        lags.percentiles[99.0],
        lags.max,
        late.percentiles[99.0],
        late.max,
        cpu,
        per_chunk,
        tuple(warnings),
    )
