"""Who waited for whom, step by step: lanes over time as SVG.

trainer        computing, waiting for a batch, pushing weights, writing records
engines        the share of the time in which they computed is the height
environments   the share of an episode's time that they took is the height
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from glm5.rl.waits import waited

MOST_STEPS = 200
"""Of a picture: the last ones."""
_WIDTH, _LANE, _GAP = 640, 24, 8
_PHASES = {"waiting": ("wait_for_batch", "rollout"), "training": ("train",), "push": ("push",), "record": ("record",)}
_LANES = {"engines": ("computing", lambda share: 1 - share), "environment": ("answering", lambda share: share)}


def timeline(lines: Sequence[Mapping[str, Any]]) -> str:
    """A figure of a run's steps, with the shares of all in words; empty where they were not measured."""
    steps = [one for one in lines if "wait/trainer" in one and 0 < one.get("time/step", 0) < math.inf][-MOST_STEPS:]
    if not steps:
        return ""
    total = sum(one["time/step"] for one in steps)
    parts, began = list[str](), 0.0
    for one in steps:
        parts += _step(one, began, _WIDTH / total)
        began += one["time/step"]
    names = "".join(
        f'<text x="4" y="{(_LANE + _GAP) * lane + 15}">{name}</text>'
        for lane, name in enumerate(("trainer", "engines", "environments"))
    )
    keys = "".join(f'<span class="{name}">{name}</span>' for name in (*_PHASES, "computing", "answering"))
    first, last, box = steps[0]["step"], steps[-1]["step"], f"0 0 {_WIDTH} {3 * (_LANE + _GAP)}"
    return (
        f'<h2>Who waited</h2><p>{waited(lines)}</p><div class="card"><figure><svg class="timeline" viewBox="{box}" '
        f'role="img" aria-label="who waited, by time">{"".join(parts)}{names}</svg><figcaption>{keys}steps {first} to '
        f"{last}, {total:.4g} s</figcaption></figure></div>"
    )


def _step(line: Mapping[str, Any], began: float, scale: float) -> list[str]:
    parts, at = list[str](), began
    for kind, names in _PHASES.items():
        seconds = sum(line.get(f"time/{name}", 0.0) for name in names)
        parts.append(_bar(kind, at, seconds, scale, 0, 1.0, f"step {line['step']}: {kind} {seconds:.3g} s"))
        at += seconds
    for lane, (name, (kind, share_of)) in enumerate(_LANES.items(), 1):
        if f"wait/{name}" in line:
            share = min(1.0, max(0.0, share_of(line[f"wait/{name}"])))
            title = f"step {line['step']}: {kind} {100 * share:.0f} %"
            parts.append(_bar(kind, began, line["time/step"], scale, lane, share, title))
    return parts


def _bar(kind: str, began: float, seconds: float, scale: float, lane: int, share: float, title: str) -> str:
    height = _LANE * share
    return (
        f'<rect class="{kind}" x="{began * scale:.2f}" y="{lane * (_LANE + _GAP) + _LANE - height:.1f}" '
        f'width="{seconds * scale:.2f}" height="{height:.1f}"><title>{html.escape(title)}</title></rect>'
    )
