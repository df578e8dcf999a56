"""OUT/report.html: a page without scripts, with curves of metrics over all steps and a table of stages."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.common.atomic import atomic_write
from glm5.config.train import Recipe
from glm5.train.metrics import read_metrics

CURVES = (
    ("loss", "held-out loss"),
    ("held-out accuracy",),
    ("mtp",),
    ("index", "mtp index"),
    ("attention recall",),
    ("lr",),
    ("trunk norm", "indexer norm"),
    ("excess load",),
    ("tokens/s",),
    ("mfu",),
)
"""Metrics that share a plot; those without values are left out."""
WIDTH, HEIGHT, MOST_POINTS = 640, 180, 1000
COLOURS = ("#1f5fbf", "#c2410c")
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
svg { width: 100%; background: #fafafa } figcaption span { margin-right: 1rem } figure { margin: 1.5rem 0 }"""


def write_report(out: Path, recipe: Recipe) -> Path:
    """Write the page from metrics.jsonl, atomically; returns its path."""
    records = read_metrics(out)
    starts: dict[str, int] = {}
    done = 0
    for stage in recipe.stage:
        starts[stage.name] = done
        done += stage.steps
    plots = [_plot(names, records, starts, done) for names in CURVES]
    title = html.escape(recipe.name)
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1>{_table(records, recipe)}{''.join(plots)}</html>\n"
    )
    with atomic_write(out / "report.html") as handle:
        handle.write(page)
    return out / "report.html"


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


def _plot(names: Sequence[str], records: Sequence[Mapping[str, Any]], starts: Mapping[str, int], total: int) -> str:
    """A plot; empty where no record has any of the names. Dashed lines separate the stages."""
    curves = {name: _points(name, records, starts) for name in names}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return ""
    values = [value for points in curves.values() for _, value in points]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    lines = [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}" stroke="#bbb" stroke-dasharray="4"/>'
        for start in starts.values()
        if start and (x := WIDTH * start / total)
    ]
    captions: list[str] = []
    for colour, (name, points) in zip(COLOURS, curves.items(), strict=False):
        coordinates = " ".join(
            f"{WIDTH * step / total:.1f},{HEIGHT - 4 - (HEIGHT - 8) * (value - low) / span:.1f}"
            for step, value in points
        )
        lines.append(f'<polyline points="{coordinates}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        captions.append(f'<span style="color:{colour}">{html.escape(name)}, last {points[-1][1]:.4g}</span>')
    label = html.escape(", ".join(curves))
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label} by step">{"".join(lines)}</svg>'
        f"<figcaption>{''.join(captions)}from {low:.4g} to {high:.4g}</figcaption></figure>"
    )


def _points(name: str, records: Sequence[Mapping[str, Any]], starts: Mapping[str, int]) -> list[tuple[int, float]]:
    """(step of the run, value), thinned to at most MOST_POINTS points."""
    found = [(starts[record["stage"]] + record["step"], record[name]) for record in records if name in record]
    every = -(-len(found) // MOST_POINTS)
    return found[::every] if every > 1 else found
