"""Runs of one recipe beside each other, from their metrics: rewards by wall time, time to equal reward, staleness, what
was dropped, and how busy each device was.

    python -m tests.support.side_by_side runs/rl-agents runs/rl-agents-turns [--minute 60] [--json FILE]

Seconds are those of training steps; evaluations are not in them. Time to equal reward: until the mean of five steps is
95 % of the least that any run has at its end.
"""

import argparse
import json
import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median

from glm5.rl.watch import read_lines
from tests.support.latency import steps_of

Lines = Sequence[dict[str, float]]
OVER, SHARE = 5, 0.95


def smoothed(lines: Lines, name: str) -> list[float]:
    """The mean of the last five steps that have it, at each; 0 where none has."""
    windows = (lines[max(0, last - OVER + 1) : last + 1] for last in range(len(lines)))
    return [fmean([one[name] for one in some if name in one] or [0.0]) for some in windows]


def seconds_to(lines: Lines, name: str, goal: float) -> float | None:
    """Until the mean of five steps is `goal`; None if it never is."""
    seconds = accumulate(one["time/step"] for one in lines)
    found = zip(range(len(lines)), seconds, smoothed(lines, name), strict=True)
    return next((at for number, at, value in found if number >= OVER - 1 and value >= goal), None)


def figures(lines: Lines) -> dict[str, float]:
    """Of a whole run: devices' shares of its time, tokens a second, staleness."""
    total = sum(one["time/step"] for one in lines)

    def timed(name: str) -> float:
        return sum(one[name] * one["time/step"] for one in lines if name in one) / total

    dropped, checked = (sum(one.get(f"staleness/{key}", 0.0) for one in lines) for key in ("dropped", "checked"))
    return {
        "steps": len(lines),
        "seconds": total,
        "seconds a step, median": median(one["time/step"] for one in lines),
        "trainer busy, share": sum(one["time/train"] for one in lines) / total,
        "push, share": sum(one["time/push"] for one in lines) / total,
        "engine busy, share": 1 - timed("wait/engines"),
        "environment, share of an episode": timed("wait/environment"),
        "sampled tokens/s": timed("perf/rollout_tok_s"),
        "trained tokens/s while training": fmean(one["perf/train_tok_s"] for one in lines),
        "staleness, mean pushes": fmean(one["staleness/mean"] for one in lines),
        "staleness, most": max(one["staleness/max"] for one in lines),
        "dropped as stale, share of episodes": dropped / max(checked, 1.0),
        "failed, share of episodes": fmean(one.get("episode/failed", 0.0) for one in lines),
    }


def compare(outs: Sequence[Path], minute: float) -> dict[str, dict[str, dict[str, object]]]:
    """By run: its figures, and by name the curves by wall time with times to equal reward, and evaluations."""
    runs = {out.name: steps_of(out) for out in outs}
    first = next(iter(runs.values()))[0]
    names = ["reward/mean", *sorted(key for key in first if key.startswith("reward/") and key[7:] not in _OTHERS)]
    goals = {name: SHARE * min(smoothed(lines, name)[-1] for lines in runs.values()) for name in names}
    found = dict[str, dict[str, dict[str, object]]]()
    for out in outs:
        lines, rewards = runs[out.name], dict[str, object]()
        seconds = list(accumulate(one["time/step"] for one in lines))
        for name in names:
            curve, marks = smoothed(lines, name), range(1, 1 + math.ceil(seconds[-1] / minute))
            at = [max((n for n, s in enumerate(seconds) if s <= mark * minute), default=0) for mark in marks]
            rewards[name] = {
                "first step": lines[0].get(name),
                "curve": [round(curve[n], 4) for n in at],
                "goal": goals[name],
                "seconds to goal": seconds_to(lines, name, goals[name]),
            }
        evaluated = dict[str, object]()
        for line in read_lines(out / "metrics.jsonl"):
            evaluated |= {f"{key}, step {line['step']}": line[key] for key in line if key.startswith("eval/")}
        found[out.name] = {"figures": {**figures(lines)}, "rewards": rewards, "evaluations": evaluated}
    return found


_OTHERS = ("mean", "std", "frac_zero_std")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--minute", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = compare(args.out, args.minute)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    for name, run in found.items():
        print(name)
        for part in run.values():
            for key, value in part.items():
                print(f"  {key}: {value:.4g}" if isinstance(value, float) else f"  {key}: {value}")


if __name__ == "__main__":
    main()
