"""Throughput and latency over the number of clients, as a PNG. Needs matplotlib, of the extra `plot`."""

import os
from collections.abc import Sequence
from typing import Any

from glm5.bench.serve.statistics import Result
from glm5.common.atomic import atomic_write
from glm5.common.extras import require

SIZE, DPI = (12.0, 4.2), 120  # inches, dots an inch


def check() -> None:
    """Raises MissingExtra where matplotlib is not installed."""
    require("matplotlib.figure", "plot")


def write_plot(path: str | os.PathLike[str], results: Sequence[Result], title: str) -> None:
    """Three panels: throughput, throughput against speed for one user, latencies. Runs without answers are left out."""
    shown = sorted((r for r in results if r.clients is not None and r.completed), key=lambda r: r.clients or 0)
    figure = require("matplotlib.figure", "plot").Figure(figsize=SIZE, layout="constrained")
    throughput, trade, latency = figure.subplots(1, 3)
    clients = [result.clients for result in shown]
    _lines(throughput, clients, {"output": [r.output_throughput for r in shown]}, "tokens/s")
    steady = [(r.clients, r.steady_output_throughput) for r in shown if r.steady_output_throughput is not None]
    if steady:
        throughput.plot(*zip(*steady, strict=True), marker=".", linestyle="--", label="while all clients were busy")
    throughput.legend()
    trade.plot([r.speed_per_user for r in shown], [r.output_throughput for r in shown], marker="o")
    for result in shown:
        point = (result.speed_per_user, result.output_throughput)
        trade.annotate(str(result.clients), point, xytext=(4, 4), textcoords="offset points")
    trade.set(xlabel="tokens/s of one user", ylabel="tokens/s of all")
    trade.grid(alpha=0.3)
    curves: dict[str, list[float]] = {}
    for name in ("ttft", "tpot"):
        for percent in sorted({percent for r in shown for percent in r.times[name].percentiles}):
            curves[f"{name.upper()} p{percent:g}"] = [r.times[name].percentiles[percent] for r in shown]
    _lines(latency, clients, curves, "ms")
    latency.set_yscale("log")
    latency.yaxis.set_major_formatter("{x:g}")
    latency.yaxis.set_minor_formatter("{x:g}")
    latency.legend()
    figure.suptitle(title)
    with atomic_write(path, "wb") as handle:
        figure.savefig(handle, format="png", dpi=DPI)


def _lines(axes: Any, clients: Sequence[int | None], curves: dict[str, list[float]], unit: str) -> None:
    for label, values in curves.items():
        axes.plot(clients, values, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(clients, [str(number) for number in clients])
    axes.minorticks_off()
    axes.set(xlabel="clients", ylabel=unit)
    axes.grid(alpha=0.3)
