"""A transition as a table, a plot and verdicts, with means and standard deviations over seeds."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm5.bench.transition.run import DENSE, DENSE_MORE, DSA, DSA_NEW, DSA_WARM, PATTERN, WINDOWS, Done, Row
from glm5.common.atomic import atomic_write
from glm5.quantize.report import styled
from glm5.quantize.report import table as html_table

DENSE_AT_LEAST = 0.93
"""Minimum accuracy of dense attention. Below it, the task was not learnt and later results mean nothing."""
GAP, WINDOW_GAP = 0.02, 0.40
"""DSA is at most the first below dense attention trained as long; windows in all layers at least the second."""
_ALL_LAYERS = WINDOWS["S"]
ORDER = (
    DENSE,
    *WINDOWS.values(),
    PATTERN,
    DSA_NEW,
    DSA_WARM,
    DSA,
    *(f"{name}, adapted" for name in (*WINDOWS.values(), PATTERN)),
    DENSE_MORE,
)
_HEAD = ("attention", "keys %", "accuracy %", "spread", "below dense", "loss", "recall %")
WIDTH, BAR, LABELS = 760, 26, 220  # of the picture, in pixels


@dataclass(frozen=True)
class Line:
    """One kind of attention over all seeds. `spread`: standard deviation of the accuracy; `gap`: mean accuracy below
    dense attention with as many training steps."""

    name: str
    keys: float
    accuracy: float
    spread: float
    gap: float
    loss: float
    recall: float | None
    each: tuple[float, ...]


def lines(done: Sequence[Done]) -> list[Line]:
    """In the order zero-shot, transition, controls with as many training steps."""
    rows = [row for one in done for row in one.rows]
    more = {row.seed: row.accuracy for row in rows if row.name == DENSE_MORE}
    base = {row.seed: row.accuracy for row in rows if row.name == DENSE}
    found: list[Line] = []
    for name in ORDER:
        some = sorted((row for row in rows if row.name == name), key=lambda row: row.seed)
        trained = name in (DSA, DENSE_MORE) or name.endswith("adapted")
        found.append(_line(name, some, more if trained else base))
    return found


def _line(name: str, rows: Sequence[Row], dense: Mapping[int, float]) -> Line:
    each = tuple(row.accuracy for row in rows)
    mean = sum(each) / len(each)
    spread = math.sqrt(sum((one - mean) ** 2 for one in each) / max(1, len(each) - 1))
    recalls = [row.recall for row in rows if row.recall is not None]
    return Line(
        name=name,
        keys=sum(row.keys for row in rows) / len(rows),
        accuracy=mean,
        spread=spread,
        gap=sum(dense[row.seed] - row.accuracy for row in rows) / len(rows),
        loss=sum(row.loss for row in rows) / len(rows),
        recall=sum(recalls) / len(recalls) if recalls else None,
        each=each,
    )


def verdicts(found: Sequence[Line]) -> dict[str, bool]:
    """The claims that the transition should show, and whether it does."""
    by_name = {line.name: line for line in found}
    window, adapted = by_name[_ALL_LAYERS], by_name[f"{_ALL_LAYERS}, adapted"]
    dsa, dense = by_name[DSA], by_name[DENSE]
    return {
        f"dense attention is right in {_percent(min(dense.each))} % of cases or more; at least "
        f"{_percent(DENSE_AT_LEAST)}": min(dense.each) >= DENSE_AT_LEAST,
        f"DSA is {_percent(dsa.gap)} points below dense attention trained as long, which is at most {_percent(GAP)}": (
            dsa.gap <= GAP
        ),
        f"windows in all layers are {_percent(window.gap)} points below at once and {_percent(adapted.gap)} adapted; "
        f"at least {_percent(WINDOW_GAP)}": min(window.gap, adapted.gap) >= WINDOW_GAP,
    }


def as_text(found: Sequence[Line]) -> str:
    """A table for a terminal."""
    rows = [_HEAD, *(_cells(line) for line in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def document(done: Sequence[Done], settings: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Everything as JSON."""
    found = lines(done)
    return {
        "settings": dict(settings),
        "seconds": seconds,
        "cpu_seconds": sum(one.cpu_seconds for one in done),
        "lines": [asdict(line) for line in found],
        "verdicts": verdicts(found),
        "trainings": [asdict(one) for one in done],
    }


def write_report(folder: Path, done: Sequence[Done], settings: Mapping[str, Any], seconds: float) -> None:
    """transition.json, transition.html, and its picture by itself."""
    found = lines(done)
    with atomic_write(folder / "transition.json") as handle:
        handle.write(json.dumps(document(done, settings, seconds), indent=1) + "\n")
    with atomic_write(folder / "transition.svg") as handle:
        handle.write(picture(found) + "\n")
    claims = [f"<p>{'' if holds else 'NOT SHOWN: '}{text}</p>" for text, holds in verdicts(found).items()]
    title = "From dense attention to selected keys"
    body = [f"<h1>{title}</h1>", picture(found), html_table(_HEAD, [_cells(line) for line in found]), *claims]
    with atomic_write(folder / "transition.html") as handle:
        handle.write(styled(title, body))


def picture(found: Sequence[Line]) -> str:
    """A bar for each mean, a dot for each seed, as SVG."""
    width, drawn = WIDTH - LABELS - 60, []
    for i, line in enumerate(found):
        y, colour = i * BAR + BAR / 2, _colour(line.name)
        drawn.append(f'<text x="{LABELS - 8}" y="{y + 4:.1f}" text-anchor="end" font-size="13">{line.name}</text>')
        drawn.append(
            f'<rect x="{LABELS}" y="{y - BAR * 0.35:.1f}" width="{width * line.accuracy:.1f}" '
            f'height="{BAR * 0.7:.1f}" fill="{colour}"/>'
        )
        drawn += [f'<circle cx="{LABELS + width * one:.1f}" cy="{y:.1f}" r="3" fill="#111"/>' for one in line.each]
        right = f'x="{LABELS + width + 8}" y="{y + 4:.1f}" font-size="13"'
        drawn.append(f"<text {right}>{_percent(line.accuracy)}</text>")
    box = f'viewBox="0 0 {WIDTH} {len(found) * BAR}" width="100%" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}><title>Accuracy in percent</title>{"".join(drawn)}</svg>'


def _colour(name: str) -> str:
    return "#c98a4b" if name.startswith("SWA") else "#4472a8" if name.startswith("DSA") else "#8a8f98"


def _cells(line: Line) -> tuple[str, ...]:
    recall = "" if line.recall is None else _percent(line.recall)
    accuracy, spread, gap = _percent(line.accuracy), _percent(line.spread), _percent(line.gap)
    return (line.name, _percent(line.keys), accuracy, spread, gap, f"{line.loss:.4f}", recall)


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f}"  # plus 0: never -0.0
