"""OUT/report.html: a page without scripts, with curves of metrics over all steps and a table of stages."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.common.atomic import atomic_write
from glm5.common.plot import STYLE, plot
from glm5.config.train import Recipe
from glm5.train.metrics import read_metrics

CURVES = {
    ("loss", "held-out loss"): "nats",
    ("bits per byte",): "held-out text",
    ("accuracy", "held-out accuracy"): "share",
    ("margin", "held-out margin"): "nats",
    ("calibration error", "calibrated error"): "share",
    ("temperature",): "",
    ("mtp",): "nats",
    ("index", "mtp index"): "nats",
    ("attention recall",): "share of probability",
    ("lr",): "learning rate",
    ("trunk norm", "indexer norm"): "of gradients",
    ("excess load",): "share of the mean load",
    ("tokens/s",): "tokens a second",
    ("mfu",): "share of peak_tflops",
}
"""Metrics that share a plot, with their unit; those without values are left out."""
PAGE_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }"""


def write_report(out: Path, recipe: Recipe) -> Path:
    """Write the page from metrics.jsonl, atomically; returns its path."""
    records = read_metrics(out)
    starts: dict[str, int] = {}
    done = 0
    for stage in recipe.stage:
        starts[stage.name] = done
        done += stage.steps
    marks = list(starts.values())
    plots = [
        plot({name: _points(name, records, starts) for name in names}, done, marks, y=unit)
        for names, unit in CURVES.items()
    ]
    return write_page(out / "report.html", recipe.name, _table(records, recipe) + "".join(plots))


def write_page(path: Path, title: str, body: str) -> Path:
    """Write a report, atomically; returns its path."""
    title = html.escape(title)
    with atomic_write(path) as handle:
        handle.write(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
            f"<style>{PAGE_STYLE}\n{STYLE}</style><h1>{title}</h1>{body}</html>\n"
        )
    return path


def _table(records: Sequence[Mapping[str, Any]], recipe: Recipe) -> str:
    rows: list[str] = []
    for stage in recipe.stage:
        of_stage = [record for record in records if record["stage"] == stage.name]
        steps = [record for record in of_stage if "held out" not in record]
        held = [record["held-out loss"] for record in of_stage if "held-out loss" in record]
        seconds = sum(record["seconds"] for record in steps)
        best = f"{min(held):.4g}" if held else ""
        last = f"{steps[-1]['loss']:.4g}" if steps and "loss" in steps[-1] else ""
        cells = (stage.name, stage.kind, f"{len(steps):,}", f"{stage.seq_len:,}", last, best, f"{seconds:,.0f} s")
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    heads = ("stage", "kind", "steps", "seq_len", "last loss", "best held-out loss", "time in steps")
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{''.join(rows)}</table>"


def _points(name: str, records: Sequence[Mapping[str, Any]], starts: Mapping[str, int]) -> list[tuple[float, float]]:
    """(step of the run, value)."""
    return [(starts[record["stage"]] + record["step"], record[name]) for record in records if name in record]
