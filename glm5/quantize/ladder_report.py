"""A ladder's rows as a table, verdicts, and a page: means over models and seeds, and their spread."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from glm5.common.atomic import atomic_write
from glm5.quantize.report import bars, styled, table

HALF = 0.5  # of what RTN adds to W8A8's KL, the full recipe may add at most
POINTS = 1.0  # of accuracy that it may lose
_MEANS = ("kl", "kl_median", "kl_answers", "top1", "perplexity", "perplexity_answers", "accuracy", "lost")
_HEAD = (
    "rung",
    "runs",
    "KL",
    "spread",
    "median",
    "answers'",
    "top-1 %",
    "perplexity",
    "answers'",
    "accuracy %",
    "points lost",
)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a rung, in the rows' order: means over all runs; `spread`: standard deviation of KL among them."""
    names = list(dict.fromkeys(row["rung"] for row in rows))
    found: list[dict[str, Any]] = []
    for name in names:
        some = [row for row in rows if row["rung"] == name]
        mean = {key: sum(row[key] for row in some) / len(some) for key in _MEANS}
        spread = math.sqrt(sum((row["kl"] - mean["kl"]) ** 2 for row in some) / max(1, len(some) - 1))
        interval = math.sqrt(sum(row["lost_interval"] ** 2 for row in some)) / len(some)
        found.append({"rung": name, "runs": len(some), **mean, "spread": spread, "lost_interval": interval})
    return found


def verdicts(found: Sequence[dict[str, Any]]) -> list[str]:
    """What the ladder is to show, and what is no better than the rung before it; a sentence each."""
    by_name = {each["rung"]: each for each in found}
    sentences: list[str] = []
    for kind in ("channel", "group"):
        eight_bits = "w8a8" if kind == "channel" else "w8a8-fp8"
        needed = [by_name.get(name) for name in (eight_bits, f"{kind} rtn", f"{kind} gptq")]
        if any(each is None for each in needed):
            continue
        eight, plain, full = (each for each in needed if each is not None)
        ours, theirs = full["kl"] - eight["kl"], plain["kl"] - eight["kl"]
        holds = ours <= HALF * theirs
        sentences.append(
            f"{kind}: beyond {eight_bits}, the full recipe adds KL {ours:.5f}, RTN {theirs:.5f}: "
            f"{ours / theirs if theirs > 0 else float('nan'):.2f} of it, {'at most' if holds else 'NOT at most'} half"
        )
        near = abs(full["lost"]) <= POINTS
        sentences.append(
            f"{kind}: the full recipe loses {full['lost']:.2f} +- {full['lost_interval']:.2f} points of accuracy, "
            f"{'within' if near else 'NOT within'} {POINTS:g}; RTN {plain['lost']:.2f} +- {plain['lost_interval']:.2f}"
        )
        sentences += _losses(by_name, kind)
    return sentences


def _losses(by_name: dict[str, dict[str, Any]], kind: str) -> list[str]:
    sentences: list[str] = []
    names = [name for name in by_name if name.startswith(kind) and not name.endswith("upstream")]
    for before, name in pairwise(names):
        sentences += _no_better(by_name[name], by_name[before])
    for name in names:
        if (upstream := by_name.get(f"{name} upstream")) is not None:
            sentences += _no_better(by_name[name], upstream)
    return sentences


def _no_better(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    noise = max(one["spread"], other["spread"])
    change = one["kl"] - other["kl"]
    if change < -noise:
        return []
    word = "a tie with" if abs(change) <= noise else "WORSE than"
    return [f"{one['rung']} is {word} {other['rung']}: KL {one['kl']:.5f} and {other['kl']:.5f}, spread {noise:.5f}"]


def as_text(found: Sequence[dict[str, Any]]) -> str:
    """A table for a terminal."""
    rows = [_HEAD, *(_cells(each) for each in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = [
        [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    return "\n".join("  ".join(line) for line in lines)


def write_report(folder: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    """ladder.json and ladder.html; returns the verdicts."""
    found = summary(rows)
    sentences = verdicts(found)
    with atomic_write(folder / "ladder.json") as file:
        json.dump({"rungs": found, "verdicts": sentences, "rows": list(rows)}, file, indent=2)
    shown = [each for each in found if each["rung"] != "original"]
    body = [
        "<h1>Quantization, method by method</h1>",
        table(_HEAD, [_cells(each) for each in found]),
        *(f"<p>{line}</p>" for line in sentences),
        "<h2>KL to the original</h2>",
        bars([each["rung"] for each in shown], [each["kl"] for each in shown], slanted=True),
        "<h2>Points of accuracy lost</h2>",
        bars([each["rung"] for each in shown], [max(0.0, each["lost"]) for each in shown], slanted=True),
    ]
    with atomic_write(folder / "ladder.html") as file:
        file.write(styled("Quantization, method by method", body))
    return sentences


def _cells(each: dict[str, Any]) -> tuple[str, ...]:
    return (
        each["rung"],
        str(each["runs"]),
        f"{each['kl']:.5f}",
        f"{each['spread']:.5f}",
        f"{each['kl_median']:.5f}",
        f"{each['kl_answers']:.5f}",
        f"{100 * each['top1']:.2f}",
        f"{each['perplexity']:.4g}",
        f"{each['perplexity_answers']:.4f}",
        f"{100 * each['accuracy']:.2f}",
        f"{each['lost']:.2f} +- {each['lost_interval']:.2f}",
    )
