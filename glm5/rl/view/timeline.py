"""Who waited for whom, step by step: lanes over time as SVG.

trainer        computing, waiting for a batch, pushing weights, writing records
engines        the share of the time in which they computed is the height
environments   the share of an episode's time that they took is the height
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glm5.rl.view.render import render
from glm5.rl.waits import waited

MOST_STEPS = 200
"""Of a picture: the last ones."""
_SIZES = {"width": 640, "height": 24, "row": 32}
_PHASES = {"waiting": ("wait_for_batch", "rollout"), "training": ("train",), "push": ("push",), "record": ("record",)}
_LANES = {"engines": ("computing", lambda share: 1 - share), "environment": ("answering", lambda share: share)}


def timeline(lines: Sequence[Mapping[str, Any]]) -> str:
    """A figure of a run's steps, with the shares of all in words; empty where they were not measured."""
    steps = [one for one in lines if "wait/trainer" in one and 0 < one.get("time/step", 0) < math.inf][-MOST_STEPS:]
    if not steps:
        return ""
    total, bars, began = sum(one["time/step"] for one in steps), list[dict[str, object]](), 0.0
    for one in steps:
        bars += _bars(one, began, _SIZES["width"] / total)
        began += one["time/step"]
    kinds = (*_PHASES, *(kind for kind, _ in _LANES.values()))
    return render("timeline", bars=bars, waited=waited(lines), kinds=kinds, steps=steps, total=total, sizes=_SIZES)


def _bars(line: Mapping[str, Any], began: float, scale: float) -> Iterator[dict[str, object]]:
    at = began
    for kind, names in _PHASES.items():
        seconds = sum(line.get(f"time/{name}", 0.0) for name in names)
        said = f"step {line['step']}: {kind} {seconds:.3g} s"
        yield {"kind": kind, "lane": 0, "x": at * scale, "width": seconds * scale, "share": 1.0, "said": said}
        at += seconds
    for lane, (name, (kind, share_of)) in enumerate(_LANES.items(), 1):
        if f"wait/{name}" in line:
            share = min(1.0, max(0.0, share_of(line[f"wait/{name}"])))
            said, width = f"step {line['step']}: {kind} {100 * share:.0f} %", line["time/step"] * scale
            yield {"kind": kind, "lane": lane, "x": began * scale, "width": width, "share": share, "said": said}
