"""Results as text (a block for each run, one table for a sweep) and as JSON with vLLM's names."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from glm5 import __version__
from glm5.bench.serve.record import Record
from glm5.bench.serve.session import Done
from glm5.bench.serve.statistics import Result, Times
from glm5.common.atomic import atomic_write_json
from glm5.config.bench_serve import BenchServeConfig

WIDTH = 58
TITLES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token after it (TPOT)",
    "itl": "Inter-token latency (ITL)",
    "gap": "Between chunks of the stream",
    "e2el": "End-to-end latency (E2EL)",
}


def block(result: Result, metrics: Sequence[str]) -> str:
    """All results of one run, in the format of vLLM and SGLang."""
    title = " Partial result (interrupted) " if result.partial else " Serving benchmark result "
    lines = [title.center(WIDTH, "="), *_counts(result), *_rates(result)]
    for name in metrics:
        lines += [f" {TITLES[name]} ".center(WIDTH, "-"), *_times(name, result.times[name])]
        if result.first_wave and name in ("ttft", "tpot", "e2el"):
            first, later = result.first_wave[name], result.later[name]
            lines.append(_row(f"Mean of first wave / after (ms), {result.num_first_wave} req", first.mean, later.mean))
    lines += _server(result)
    lines += ["=" * WIDTH]
    lines += [f"{count} failed: {kind}: {result.error_examples[kind]}" for kind, count in result.errors.items()]
    lines += [f"warning: {text}" for text in result.honesty.warnings]
    return "\n".join(lines)


def sweep_table(results: Sequence[Result]) -> str:
    """All runs as a Markdown table, one line each. tok/s/user is 1 / mean TPOT; times are milliseconds; "first wave"
    and "after" are mean TTFTs."""
    heads = ["clients", "req/s", "out tok/s", "steady", "total tok/s", "tok/s/user", "TTFT mean", "p50", "p99"]
    heads += ["first wave", "after", "TPOT mean", "p50", "p99", "ITL p99", "E2E mean", "p99"]
    heads += ["accept", "hits", "good/s", "failed"]
    rows = [heads, *([_cell(value) for value in _line(result)] for result in results)]
    keep = [k for k in range(len(heads)) if k == 0 or any(row[k] not in ("-", "0") for row in rows[1:])]
    widths = [max(len(row[k]) for row in rows) for k in keep]
    lines = [[f"{row[k]:>{width}}" for k, width in zip(keep, widths, strict=True)] for row in rows]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_json(path: str | os.PathLike[str], settings: BenchServeConfig, runs: Sequence[Done]) -> None:
    """Write the results so far, atomically."""
    atomic_write_json(path, document(settings, runs))


def document(settings: BenchServeConfig, runs: Sequence[Done]) -> dict[str, Any]:
    """The content of the JSON file. Values of headers are left out, because they may be API keys."""
    given = settings.model_dump(mode="json", by_alias=True, exclude_none=True)
    given |= {"header": list(settings.headers), "request_rate": str(settings.request_rate)}
    info = runs[-1].info._asdict() if runs else {}
    results = [as_json(done.result) for done in runs]
    if settings.save_detailed:
        for result, done in zip(results, runs, strict=True):
            result["requests"] = [_detail(record, done.outcome.start) for record in done.outcome.records]
    return {
        "tool": f"glm5 {__version__} bench serve",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "url": settings.url,
        **info,
        "partial": any(done.result.partial for done in runs),
        "settings": given,
        "runs": results,
    }


def as_json(result: Result) -> dict[str, Any]:
    """One run with the names of vLLM's result files where they exist."""
    same = asdict(result)
    for name in ("clients", "times", "first_wave", "later", "steady_output_throughput", "peak_output_throughput"):
        del same[name]
    return {
        "max_concurrency": result.clients,
        **same,
        "steady_output_throughput": result.steady_output_throughput,
        "max_output_tokens_per_s": result.peak_output_throughput,
        "max_concurrent_requests": result.peak_concurrency,
        "acceptance_length": result.acceptance_length,
        "speed_per_user": result.speed_per_user,
        **_flat(result.times),
        "first_wave": _flat(result.first_wave),
        "after_first_wave": _flat(result.later),
    }


def _flat(times: Mapping[str, Times]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, of in times.items():
        flat |= {f"mean_{name}_ms": of.mean, f"std_{name}_ms": of.std, f"max_{name}_ms": of.max}
        for percent, value in of.percentiles.items():
            flat[f"p{percent:g}_{name}_ms"] = value
            if percent == 50:
                flat[f"median_{name}_ms"] = value
    return flat


def _detail(record: Record, start: float) -> dict[str, Any]:
    is_complete = record.error is None
    return {
        "conversation": record.conversation,
        "turn": record.turn,
        "first_wave": record.first_wave,
        "due": record.due - start,
        "sent": record.sent - start,
        "error": record.error,
        "message": record.message,
        "finish_reason": record.finish,
        "input_len": record.usage.prompt_tokens,
        "output_len": record.num_tokens if is_complete else None,
        "ttft": record.ttft if is_complete else None,
        "latency": record.latency if is_complete else None,
        "arrivals": [at - record.sent for at in record.arrivals],
        "tokens": list(record.tokens),
    }


def _counts(result: Result) -> list[str]:
    lines = [_row("Clients", result.clients if result.clients is not None else "open load")]
    lines.append(_row("Successful requests", result.completed))
    lines.append(_row("Failed requests", result.failed))
    if result.unfinished:
        lines.append(_row("Unfinished requests", result.unfinished))
    if set(result.finish_reasons) - {"length"}:
        lines.append(_row("Ended by", ", ".join(f"{kind} {num}" for kind, num in result.finish_reasons.items())))
    lines.append(_row("Duration (s)", result.duration))
    lines.append(_row("Input tokens", result.total_input_tokens))
    lines.append(_row("Output tokens", result.total_output_tokens))
    return lines


def _rates(result: Result) -> list[str]:
    lines = [_row("Request throughput (req/s)", result.request_throughput)]
    if result.request_goodput is not None:
        lines.append(_row("Request goodput (req/s)", result.request_goodput))
    lines.append(_row("Output token throughput (tok/s)", result.output_throughput))
    if result.steady_output_throughput is not None:
        lines.append(_row("  while all clients were busy (tok/s)", result.steady_output_throughput))
    lines += [
        _row("Peak output token throughput (tok/s)", result.peak_output_throughput),
        _row("Total token throughput (tok/s)", result.total_token_throughput),
        _row("Speed for one user (tok/s)", result.speed_per_user),
        _row("Requests under way, mean / peak", result.mean_concurrency, result.peak_concurrency),
    ]
    return lines


def _times(name: str, times: Times) -> list[str]:
    if not times.num:
        return [_row("none measured", "")]
    lines = [_row(f"Mean {name.upper()} (ms)", times.mean)]
    lines += [_row(f"P{percent:g} {name.upper()} (ms)", value) for percent, value in times.percentiles.items()]
    return lines


def _server(result: Result) -> list[str]:
    server, lines = result.server, []
    if server.simulated_acceptance is not None:
        lines.append(_row("SIMULATED acceptance (tokens a step)", server.simulated_acceptance))
    if result.acceptance_length is not None:
        lines.append(_row("Acceptance length (tokens a step)", result.acceptance_length))
    if server.acceptance_rate is not None:
        lines.append(_row("Acceptance rate of drafts (%)", server.acceptance_rate * 100))
    if server.per_position:
        lines.append(_row("  by position (%)", " / ".join(f"{share * 100:.1f}" for share in server.per_position)))
    if server.prefix_queries:
        lines.append(_row("Prefix cache hits (%)", (server.prefix_hits or 0) / server.prefix_queries * 100))
    elif result.cached_tokens is not None and result.total_input_tokens:
        lines.append(_row("Cached prompt tokens (%)", result.cached_tokens / result.total_input_tokens * 100))
    if server.hits_by_tier:
        lines.append(_row("  tokens by tier", ", ".join(f"{t} {n}" for t, n in sorted(server.hits_by_tier.items()))))
    if server.preemptions:
        lines.append(_row("Preemptions", server.preemptions))
    title = [" The server's own account ".center(WIDTH, "-")] if lines else []
    client = result.honesty
    lines.append(" The client itself ".center(WIDTH, "-"))
    lines.append(_row("Event loop late, p99 / max (ms)", client.lag_p99, client.lag_max))
    lines.append(_row("CPU (% of a core; us a chunk)", client.cpu * 100, client.microseconds_per_chunk))
    return title + lines


def _row(label: str, *values: object) -> str:
    text = " / ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)
    return f"{label}:".ljust(max(WIDTH - 18, len(label) + 2)) + f"{text:<}"


def _line(result: Result) -> list[object]:
    ttft, tpot, itl, e2el = (result.times[name] for name in ("ttft", "tpot", "itl", "e2el"))
    waves = [side["ttft"].mean if side else None for side in (result.first_wave, result.later)]
    hits = result.server.prefix_hits, result.server.prefix_queries
    return [
        result.clients if result.clients is not None else "open",
        result.request_throughput,
        result.output_throughput,
        result.steady_output_throughput,
        result.total_token_throughput,
        result.speed_per_user,
        *(ttft.mean, ttft.percentiles.get(50.0), ttft.percentiles.get(99.0)),
        *waves,
        *(tpot.mean, tpot.percentiles.get(50.0), tpot.percentiles.get(99.0)),
        itl.percentiles.get(99.0),
        *(e2el.mean, e2el.percentiles.get(99.0)),
        result.acceptance_length,
        f"{(hits[0] or 0) / hits[1]:.0%}" if hits[1] else None,
        result.request_goodput,
        result.failed,
    ]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.2f}" if value < 100 else f"{value:.1f}"
    return str(value)
