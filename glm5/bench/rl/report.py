"""Results of `glm5 bench rl` as a table and as JSON."""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from glm5.bench.report import about
from glm5.bench.rl.run import Measured
from glm5.config.bench_rl import BenchRLConfig
from glm5.config.rl import RLRecipe

RATES = {"rollouts": "perf/rollout_tok_s", "training": "perf/train_tok_s"}
TIMES = {"processor time of a step": "cpu_per_step", "time to the reward": "wall", "processor time to it": "cpu"}


def document(settings: BenchRLConfig, recipe: RLRecipe, measured: Sequence[Measured]) -> dict[str, Any]:
    """Everything, as JSON. Ratios: how many times as fast this package is. Times are seconds, to the reward medians of
    the seeds, None where a seed did not reach it."""
    sides = [_side(settings, one) for one in measured]
    found: dict[str, Any] = {**about("rl", settings), "recipe": recipe.model_dump(mode="json"), "sides": sides}
    if len(sides) == 2:
        ours, peer = sides
        ratios: dict[str, float | None] = {}
        for name in RATES:
            ratios |= {f"{name}, {which}": ours[name][which] / peer[name][which] for which in ("median", "fastest")}
        for name, key in TIMES.items():
            ratios[name] = peer[key] / ours[key] if peer[key] and ours[key] else None
        found |= {"ratios": ratios, "final_reward_difference": ours["final_reward"] - peer["final_reward"]}
        found["final_reward_spread"] = max(max(side["final_rewards"]) - min(side["final_rewards"]) for side in sides)
    return found


def _side(settings: BenchRLConfig, one: Measured) -> dict[str, Any]:
    reached = [one.reached(seed, settings.reward) for seed in settings.seeds]
    steps = [step for step in reached if step is not None]
    all_reached = len(steps) == len(reached)
    finals = [one.final(seed) for seed in settings.seeds]
    return {
        "name": one.name,
        "choice": one.choice,
        "tried": [{"choice": choice, "fastest_step": result} for choice, result in one.tried],
        **{name: one.rates(key) for name, key in RATES.items()},
        "cpu_per_step": median(run[-1].cpu / len(run) for run in one.runs.values()),
        "steps_to_reward": [step and step.figures["step"] for step in reached],
        "wall": median(step.wall for step in steps) if all_reached else None,
        "cpu": median(step.cpu for step in steps) if all_reached else None,
        "final_rewards": finals,
        "final_reward": fmean(finals),
        "rewards": {seed: [step.figures["reward/mean"] for step in run] for seed, run in one.runs.items()},
    }


def table(found: dict[str, Any]) -> str:
    """The results as a text table, with what each side was tuned to."""
    sides, settings = found["sides"], found["settings"]
    rows = [["", *(side["name"] for side in sides)]]
    for name in RATES:
        cells = (f"{side[name]['median']:.0f} ({side[name]['fastest']:.0f})" for side in sides)
        rows.append([f"{name}, tokens/s (fastest step)", *cells])
    for name, key in TIMES.items():
        rows.append([f"{name}, s", *("not reached" if side[key] is None else f"{side[key]:.2f}" for side in sides)])
    rows.append(["steps to the reward", *(" ".join(map(str, side["steps_to_reward"])) for side in sides)])
    finals = (" ".join(f"{one:.3f}" for one in side["final_rewards"]) for side in sides)
    rows.append(["final reward of each seed", *finals])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{found['machine']['processor']}; seeds {settings['seeds']}; reward {settings['reward']:g}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [
        f"{side['name']}: " + ", ".join(f"{key} {each}" for key, each in side["choice"].items()) for side in sides
    ]
    if "ratios" in found:
        ratios = [f"{name} {'-' if ratio is None else f'{ratio:.2f}'}" for name, ratio in found["ratios"].items()]
        lines.append("times as fast: " + "; ".join(ratios))
        difference, spread = found["final_reward_difference"], found["final_reward_spread"]
        within = "within" if abs(difference) <= spread else "NOT within"
        lines.append(f"final reward: difference {difference:+.3f}, {within} the spread {spread:.3f} of the seeds")
    return "\n".join(lines)
