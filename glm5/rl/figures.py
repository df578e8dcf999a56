"""The figures of a step by their usual names (docs/rl.md lists them)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, pstdev

from glm5.rl.rollout import Group
from glm5.rl.training.repair import Repairs

_NAMES = {
    "policy": "loss/policy",
    "ref_kl": "loss/ref_kl",
    "entropy": "entropy",
    "masked": "is/mask_frac",
    "mismatch_kl": "kl/mismatch",
    "ratio": "is/ratio_mean",
    "trunk norm": "grad/norm",
}


def figures_of(
    groups: Sequence[Group], trained: Mapping[str, float], repairs: Repairs, times: Mapping[str, float]
) -> dict[str, float]:
    """`trained`: what the trainer's step returned. `times`: seconds of the step's phases."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    valid = [rollout for rollout in rollouts if rollout.is_valid]
    rewards = [rollout.reward for rollout in valid] or [0.0]
    lengths = [rollout.tree.num_sampled for rollout in rollouts]
    flat = [len({rollout.reward for rollout in group.rollouts if rollout.is_valid}) < 2 for group in groups]
    found = {
        "reward/mean": mean(rewards),
        "reward/std": pstdev(rewards),
        "reward/frac_zero_std": mean(flat),
        "len/mean": mean(lengths),
        "len/max": float(max(lengths)),
        "turns/mean": mean([rollout.num_turns for rollout in rollouts]),
        "len/truncated": mean([float(rollout.is_truncated) for rollout in rollouts]),
        "group/padded": float(repairs.filled),
        "group/dropped": float(repairs.dropped),
    }
    found |= {f"env_fail/{kind}": float(count) for kind, count in repairs.failures.items()}
    by_environment: dict[str, list[float]] = defaultdict(list)
    by_metric: dict[str, list[float]] = defaultdict(list)
    for rollout in valid:
        by_environment[rollout.task.environment].append(rollout.reward)
        for name, value in rollout.metrics.items():
            by_metric[f"metric/{name}"].append(value)
    if len(by_environment) > 1:
        found |= {f"reward/{name}": mean(values) for name, values in by_environment.items()}
    found |= {name: mean(values) for name, values in by_metric.items()}
    found |= {_NAMES.get(name, f"train/{name.replace(' ', '_')}"): value for name, value in trained.items()}
    total = sum(times.values())
    found |= {f"time/{name}": seconds for name, seconds in times.items()} | {"time/step": total}
    return found | {"perf/rollout_tok_s": sum(lengths) / max(times["rollout"], 1e-9)}
