"""The policy on held-out tasks: pass@1 and pass@k."""

from collections import defaultdict
from collections.abc import Sequence
from math import comb

from glm5.rl.rollout import Group
from glm5.rl.rollouts.collect import AnyHarness, Draw, collect

SOLVED = 1.0 - 1e-9
"""Reward from which a rollout counts as a solution."""


async def evaluate(
    harness: AnyHarness, draws: Sequence[Draw], samples: int, seed: int, prefix: str = "eval"
) -> dict[str, float]:
    """Mean reward over all tasks and by environment, and pass@1 and, with several samples, pass@`samples`; with
    [reward] the means of proxy and true reward. `prefix`: the beginning of the figures' names."""
    groups = await collect(harness, draws, samples, run_seed=seed + 2**32)
    rewards: dict[str, list[float]] = defaultdict(list)
    believed: dict[str, list[float]] = {"proxy": [], "true": []}
    passed: dict[int, list[float]] = {1: [], samples: []}
    for group in groups:
        valid = [rollout for rollout in group.rollouts if rollout.is_valid]
        found = [rollout.reward for rollout in valid]
        if not found:
            continue
        for name, values in believed.items():
            values += [rollout.metrics[name] for rollout in valid if name in rollout.metrics]
        rewards[group.task.environment].append(sum(found) / len(found))
        num_solved, num_valid = solved(group)
        for k, of_tasks in passed.items():
            if k <= num_valid:
                of_tasks.append(pass_at(num_valid, num_solved, k))
    every = [reward for of_environment in rewards.values() for reward in of_environment]
    metrics = {f"{prefix}/mean": _mean(every)}
    if len(rewards) > 1:
        metrics |= {f"{prefix}/{name}": _mean(one) for name, one in rewards.items()}
    metrics |= {f"{prefix}/{name}": _mean(values) for name, values in believed.items() if values}
    return metrics | {f"{prefix}/pass@{k}": _mean(one) for k, one in passed.items()}


def solved(group: Group) -> tuple[int, int]:
    """Rollouts that solve the task, and all valid ones."""
    found = [rollout.reward >= SOLVED for rollout in group.rollouts if rollout.is_valid]
    return sum(found), len(found)


def pass_at(num_samples: int, num_solved: int, k: int) -> float:
    """The chance that one of k samples out of `num_samples` solves the task, of which `num_solved` did (Chen et al.
    2021, equation 1)."""
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
