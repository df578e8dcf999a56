"""The results of all parts, as one entry of the file of results.

    {"whole_tp8": {"decode_ms": {"1": 6.9, ...}, "ready_s": 55, "serve": {"1": {...}, ...}, "commit": ..., ...}, ...}

An entry with `projected` was not measured; `projected` names the method by which its numbers were computed.
"""

from pathlib import Path
from typing import Any

from glm5.bench.all.commands import BenchCommand, read
from glm5.bench.all.work import Work
from glm5.common.atomic import atomic_write_json

_STEPS = (
    "decode_ms",
    "decode_ms_by_context",
    "prefill_ms",
    "prefill_tok_s",
    "prefill_s_by_context",
    "mtp_tok_s",
    "mtp_tokens_a_step",
    "mtp_depth",
    "simulated_acceptance",
    "ready_s",
    "start_s",
    "kv_tokens",
    "experts",
    "kernels_built_late",
)


def entry(parts: list[BenchCommand], work: Work) -> dict[str, Any]:
    """Results of the finished parts, and partial results of an interrupted one."""
    size = work.size
    done = {part.name: document for part in parts if (document := work.found(part)) is not None}
    found: dict[str, Any] = {"preset": size.preset, "layers": size.layers, "gpus": size.gpus, "commit": work.commit}
    if (steps := done.get("steps")) is not None:
        found |= {name: _short(steps[name]) for name in _STEPS if name in steps}
        found |= {"date": steps["date"], "machine": steps["machine"], "engine": steps["engine"]}
    if (shared := done.get("shared")) is not None:
        found["shared_indices"] = {name: _short(shared[name]) for name in _STEPS if name in shared}
    serve = {str(part.clients): _load(done[part.name]) for part in parts if part.clients and part.name in done}
    if serve:
        found["serve"] = serve
    found["missing"] = [part.name for part in parts if not work.is_done(part)]
    return found


def write(path: Path, name: str, found: dict[str, Any]) -> None:
    """Add or replace one entry of the file."""
    atomic_write_json(path, (read(path) if path.exists() else {}) | {name: found})


def _load(document: dict[str, Any]) -> dict[str, Any]:
    """One run of a server under load, times in ms. The first wave, when all clients start at once, is separate."""
    (run,) = document["runs"]
    first, later = run["first_wave"], run["after_first_wave"]
    return _short(
        {
            "output_tok_s": run["output_throughput"],
            "steady_output_tok_s": run["steady_output_throughput"],
            "ttft_ms": run["mean_ttft_ms"],
            "ttft_first_wave_ms": first.get("mean_ttft_ms"),
            "ttft_after_ms": later.get("mean_ttft_ms"),
            "ttft_p99_ms": run["p99_ttft_ms"],
            "tpot_ms": run["mean_tpot_ms"],
            "itl_p99_ms": run["p99_itl_ms"],
            "requests": run["completed"],
            "partial": document["partial"],
            "failed": run["failed"],
        }
    )


def _short(value: Any) -> Any:
    """Floats rounded to three decimals, or to one from 1000 on."""
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return round(value, 3 if abs(value) < 1000 else 1) if isinstance(value, float) else value


def table(found: dict[str, Any]) -> str:
    """The server's results as a Markdown table; times in ms."""
    heads = ["clients", "output tok/s", "TTFT", "first wave", "after", "TPOT", "ITL p99"]
    names = ("output_tok_s", "ttft_ms", "ttft_first_wave_ms", "ttft_after_ms", "tpot_ms", "itl_p99_ms")
    lines = [heads, ["---"] * len(heads)]
    for clients, run in found.get("serve", {}).items():
        lines.append([clients, *("-" if run[name] is None else f"{run[name]:.1f}" for name in names)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
