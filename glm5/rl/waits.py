"""Who waited for whom: trainer, engines, and episodes for their environments.

    wait/trainer        share of a step in which the trainer had no batch
    wait/engines        share of the time in which the engines computed nothing
    wait/environment    share of an episode's time that its environment took

Beside them what a prediction of another run needs (predict.py): how long episodes take, and the engines' speed.
"""

import math
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from glm5.rl.rollout import Rollout

FIGURES = ("time/step", "wait/trainer", "wait/engines", "staleness/dropped_share")
PREDICTED = "predicted/"
"""Before the names of FIGURES in metrics.jsonl."""
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
_SAID = {
    "trainer": "trainer waited %.0f %%",
    "engines": "engines idle %.0f %%",
    "environment": "environments %.0f %% of an episode",
}


def episode_figures(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of rollouts that ended, dropped ones included: tokens, seconds and those of environments, share of failed ones,
    by environment where there are several."""
    found: dict[str, float] = {}
    if not rollouts:
        return found
    names = sorted({one.task.environment for one in rollouts})
    for name in [None, *(names if len(names) > 1 else ())]:
        some = [one for one in rollouts if name in (None, one.task.environment)]
        own = {"s": fmean(one.seconds for one in some), "turns": fmean(one.num_turns for one in some)}
        own["failed"] = fmean(one.failure not in (None, "stale") for one in some)
        for key, values in (
            ("tokens", [one.tree.num_sampled for one in some]),
            ("environment_s", [one.environment_seconds for one in some]),
        ):
            own[key] = fmean(values)
            own |= {f"{key}_{at}": float(np.quantile(values, share)) for at, share in QUANTILES.items()}
        found |= {f"episode/{key}" + (f"/{name}" if name else ""): value for key, value in own.items()}
    if found["episode/environment_s"]:
        found["wait/environment"] = found["episode/environment_s"] / max(found["episode/s"], 1e-9)
    return found


class EngineMeter:
    """What engines did between two looks at their counters."""

    def __init__(self) -> None:
        self._at, self._busy = time.monotonic(), 0.0

    def figures(self, stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """`wait/engines`, and of all time seconds of a decoding step (`engines/step_s`) and those that each sampled
        token adds, its prompts included (`engines/token_s`). An engine that was started again counts from there."""
        busy = sum(one["prefill"]["busy_us"] + one["decode_moments"][2] for one in stats) / 1e6
        now, before = time.monotonic(), self._busy if busy >= self._busy else 0.0
        share = (busy - before) / max(1e-9, (now - self._at) * len(stats))
        self._at, self._busy = now, busy
        found = {"wait/engines": max(0.0, 1.0 - share)}
        sampled = sum(one["sampled_tokens"] for one in stats)
        if sampled and (steps := sum(one["steps"] for one in stats)):
            fixed = min(_fixed_seconds([one["decode_moments"] for one in stats]), busy / steps)
            found |= {"engines/step_s": fixed, "engines/token_s": (busy - fixed * steps) / sampled}
        return found


def waited(lines: Sequence[Mapping[str, Any]]) -> str:
    """The shares of a run in words: "trainer waited 31 %, engines idle 12 %, environments 57 % of an episode"."""
    parts: list[str] = []
    for name, said in _SAID.items():
        steps = [one for one in lines if f"wait/{name}" in one and 0 < one.get("time/step", 0) < math.inf]
        if total := sum(one["time/step"] for one in steps):
            parts.append(said % (100 * sum(one[f"wait/{name}"] * one["time/step"] for one in steps) / total))
    return ", ".join(parts)


def measured(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The same FIGURES of a run's lines, without the first third of its steps, where all began at once."""
    steps = [one for one in lines if {*FIGURES[:3], "staleness/checked", "staleness/dropped"} <= one.keys()]
    steps = steps[len(steps) // 3 :]

    def total(name: str, weight: str = "") -> float:
        return sum(one[name] * one.get(weight, 1.0) for one in steps)

    if not steps or not total("time/step") or not total("staleness/checked"):
        return {}
    waits = (total(name, "time/step") / total("time/step") for name in FIGURES[1:3])
    stale = total("staleness/dropped") / total("staleness/checked")
    return dict(zip(FIGURES, (total("time/step") / len(steps), *waits, stale), strict=True))


def is_predicted(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run has written down what its steps will be like."""
    return any(PREDICTED + FIGURES[0] in one for one in lines)


def beside(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """FIGURES as they were predicted in a run, and as they were measured; empty where nothing was predicted."""
    said = next((one for one in reversed(lines) if {PREDICTED + name for name in FIGURES} <= one.keys()), {})
    found = measured(lines)
    return {name: (said[f"{PREDICTED}{name}"], found[name]) for name in FIGURES if said and found}


def in_words(figures: Mapping[str, float]) -> str:
    return (
        f"{figures['time/step']:.3g} s a step, trainer waits {100 * figures['wait/trainer']:.0f} %, engines idle "
        f"{100 * figures['wait/engines']:.0f} %, {100 * figures['staleness/dropped_share']:.1f} % of episodes stale"
    )


def _fixed_seconds(moments: Sequence[Sequence[int]]) -> float:
    """Seconds of a decoding step without sequences, by the straight line through (sequences, microseconds) of steps."""
    number, seqs, micros, squares, products, _ = np.sum(moments, axis=0, dtype=float)
    spread = number * squares - seqs * seqs
    if not number or spread <= 0:
        return micros / max(number, 1) / 1e6
    slope = max(0.0, (number * products - seqs * micros) / spread)
    return max(0.0, (micros - slope * seqs) / number) / 1e6
