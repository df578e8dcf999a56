"""Results as a table and as JSON."""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from glm5 import __version__
from glm5.bench.measure import Measured
from glm5.bench.run import Run, num_equal
from glm5.config.bench import BenchConfig
from glm5.config.command import Command

LABELS = {"ttft": "TTFT ms, mean / p50 / p99", "tpot": "TPOT ms, mean / p50 / p99"}


def document(command: str, settings: BenchConfig, measured: Measured, our_table: dict[str, str]) -> dict[str, Any]:
    """Everything, as JSON. `our_table`: the choices that our engine made."""
    ours = {**measured.ours.metrics(), "runs": _rates(measured.our_runs), "mtp": measured.drafts, "engine": our_table}
    peer = None
    if measured.peer is not None:
        threads = measured.peer_threads
        peer = {"name": measured.peer_name, **measured.peer.metrics(), "runs": _rates(measured.peer_runs[threads])}
        if threads:
            peer["threads"] = threads
            peer["by_threads"] = {
                str(n): max(_rates(runs), default=None) for n, runs in sorted(measured.peer_runs.items())
            }
        peer["equal_answers"] = num_equal(measured.ours, measured.peer)
    return {
        **about(command, settings),
        "workload": {
            "requests": len(measured.jobs),
            "prompt_tokens": sum(len(job.prompt_ids) for job in measured.jobs),
            "output_tokens": sum(job.num_output for job in measured.jobs),
        },
        "ours": ours,
        "peer": peer,
        "ratio": measured.ratio,
    }


def about(command: str, settings: Command) -> dict[str, Any]:
    """Version, date, machine and settings of a measurement, as JSON."""
    return {
        "tool": f"glm5 {__version__} bench {command}",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "devices": torch.cuda.device_count(),
            "torch": str(torch.__version__),
        },
        "settings": settings.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def table(found: dict[str, Any]) -> str:
    """The results as a text table."""
    ours, peer, workload = found["ours"], found["peer"], found["workload"]
    rows = [("", "ours", peer and peer["name"])]
    rows.append(("tokens/s", f"{ours['tokens_per_second']:.1f}", peer and f"{peer['tokens_per_second']:.1f}"))
    rows += [(label, _times(name, ours), peer and _times(name, peer)) for name, label in LABELS.items()]
    rows.append(("seconds", f"{ours['seconds']:.3f}", peer and f"{peer['seconds']:.3f}"))
    if peer is not None and "threads" in peer:
        rates = {n: "slower" if rate is None else f"{rate:.1f} tokens/s" for n, rate in peer["by_threads"].items()}
        tried = ", ".join(f"{n}: {rate}" for n, rate in rates.items())
        rows.append(("threads", ours["engine"].get("threads", ""), f"{peer['threads']} ({tried})"))
    rows.append(("drafts", _drafts(ours["mtp"]), peer and "none"))
    widths = [max(len(row[column] or "") for row in rows) for column in (0, 1)]
    lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c or ''}".rstrip() for a, b, c in rows]
    total = f"{workload['prompt_tokens']} prompt tokens, {workload['output_tokens']} output tokens, greedy"
    lines.insert(0, f"{workload['requests']} requests, {total}; the fastest of {len(ours['runs'])} runs")
    if peer is not None:
        lines.append(f"equal answers: {peer['equal_answers']} of {workload['requests']}")
        lines.append(f"ratio: {found['ratio']:.2f} times the tokens/s of {peer['name']}")
    return "\n".join(lines)


def _rates(runs: Sequence[Run]) -> list[float]:
    return [run.tokens_per_second for run in runs]


def _times(name: str, side: dict[str, Any]) -> str:
    return f"{side[f'{name}_ms']:.1f} / {side[f'p50_{name}_ms']:.1f} / {side[f'p99_{name}_ms']:.1f}"


def _drafts(mtp: dict[str, Any]) -> str:
    if not mtp["on"]:
        return "none (MTP is off)"
    kind = "adaptive" if mtp["adaptive"] else "fixed"
    return f"MTP is on: up to {mtp['max_depth']} a step, {kind}; {mtp['tokens_per_step']:.2f} tokens a step"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
