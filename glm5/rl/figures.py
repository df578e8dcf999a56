"""The figures of a step by their usual names (docs/rl.md lists them)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from glm5.rl.rollout import Group, Rollout
from glm5.rl.tasks import REPLACING
from glm5.rl.trainer import Trained
from glm5.rl.training.scores import Scores

_NAMES = {
    "policy": "loss/policy",
    "ref_kl": "loss/ref_kl",
    "teacher": "loss/teacher",
    "entropy": "entropy",
    "masked": "is/mask_frac",
    "mismatch_kl": "kl/mismatch",
    "ratio": "is/ratio_mean",
    "trunk norm": "grad/norm",
}


MOST_AGED = 4
"""Pushes: the last column of the histogram of staleness has tokens of this age and older ones."""


def figures_of(version: int, groups: Sequence[Group], trained: Trained, times: Mapping[str, float]) -> dict[str, float]:
    """`version`: of the weights with which the step started. `times`: seconds of its phases."""
    repairs = trained.repairs
    rollouts = [rollout for group in groups for rollout in group.rollouts if not rollout.is_anchor]
    valid = [rollout for rollout in rollouts if rollout.is_valid]
    rewards = [rollout.reward for rollout in valid] or [0.0]
    lengths = [rollout.tree.num_sampled for rollout in rollouts]
    flat = [len({rollout.reward for rollout in group.rollouts if rollout.is_valid}) < 2 for group in groups]
    found = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/frac_zero_std": sum(flat) / len(flat),
        "len/mean": fmean(lengths),
        "len/max": max(lengths),
        "turns/mean": fmean([rollout.num_turns for rollout in rollouts]),
        "len/truncated": fmean([float(rollout.is_truncated) for rollout in rollouts]),
        "group/padded": repairs.filled,
        "group/dropped": repairs.dropped,
        "group/refilled": len({group.number for group in groups if group.number >= REPLACING}),
    }
    found |= {f"env_fail/{kind}": count for kind, count in repairs.failures.items()}
    found |= _of_environments(valid) | _of_tokens(trained.scores) | _of_teachers(trained.scores)
    found |= _staleness(version, rollouts) | _believed(groups)
    names = {
        name: name if "/" in name else _NAMES.get(name, f"train/{name.replace(' ', '_')}") for name in trained.metrics
    }
    found |= {names[name]: value for name, value in trained.metrics.items()}
    total = sum(times.values())
    found |= {f"time/{name}": seconds for name, seconds in times.items()} | {"time/step": total}
    found["perf/rollout_tok_s"] = sum(lengths) / max(times.get("rollout", total), 1e-9)
    return {name: float(value) for name, value in found.items()}


def _of_environments(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards by environment where there are several, and the environments' own figures."""
    rewards: dict[str, list[float]] = defaultdict(list)
    metrics: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        rewards[rollout.task.environment].append(rollout.reward)
        for name, value in rollout.metrics.items():
            metrics[name].append(value)
    found = {f"metric/{name}": fmean(values) for name, values in metrics.items()}
    if len(rewards) > 1:
        found |= {f"reward/{name}": fmean(values) for name, values in rewards.items()}
    if calls := sum(metrics["tool_calls"]):
        found["tool/fail"] = sum(metrics["tool_errors"]) / calls
    return found


def _believed(groups: Sequence[Group]) -> dict[str, float]:
    """Of the proxy and the true reward (rl/rewards/blend.py), where both are known: standard deviations over all
    rollouts, and the correlation over those of a group."""
    pairs = [
        [(one.metrics["proxy"], one.metrics["true"]) for one in group.rollouts if {"proxy", "true"} <= set(one.metrics)]
        for group in groups
    ]
    if not any(pairs):
        return {}
    every_N2 = np.array([pair for of_group in pairs for pair in of_group])
    within_N2 = np.concatenate([np.array(one) - np.mean(one, axis=0) for one in pairs if one])
    squares_2 = (within_N2**2).sum(0)
    together = (within_N2[:, 0] * within_N2[:, 1]).sum()
    found = {"proxy/std": every_N2[:, 0].std(), "true/std": every_N2[:, 1].std()}
    return found | ({"proxy/correlation": together / np.sqrt(squares_2.prod())} if squares_2.all() else {})


def _of_tokens(scores: Scores) -> dict[str, float]:
    """Of trained tokens but anchors': the ratios s = current / rollout, which of them the algorithm masked, and
    advantages."""
    is_sampled_N = ~np.isnan(scores.of_trained("logprobs"))
    names = ("trainer_logprobs", "masked", "logprobs", "advantages")
    current_N, masked_N, rollout_N, advantage_N = (scores.of_trained(name)[is_sampled_N] for name in names)
    masked_N, difference_N = masked_N > 0, current_N - rollout_N
    ratio_N = np.exp(difference_N)
    return {
        "is/ratio_min": ratio_N.min(),
        "is/ratio_max": ratio_N.max(),
        "is/ratio_p99": np.quantile(ratio_N, 0.99),
        "is/ess": ratio_N.sum() ** 2 / (len(ratio_N) * (ratio_N**2).sum()),
        "is/mask_frac_low": (masked_N & (difference_N < 0)).mean(),
        "is/mask_frac_high": (masked_N & (difference_N > 0)).mean(),
        "logp/abs_diff": np.abs(difference_N).mean(),
        "logp/abs_diff_max": np.abs(difference_N).max(),
        "adv/mean": advantage_N.mean(),
        "adv/std": advantage_N.std(),
        "adv/min": advantage_N.min(),
        "adv/max": advantage_N.max(),
    }


def _of_teachers(scores: Scores) -> dict[str, float]:
    """The mean divergence KL(policy || teacher) a token, by teacher and environment."""
    if "teacher_kl" not in scores.columns:
        return {}
    parts = np.split(scores.columns["teacher_kl"], np.cumsum([len(one) for one in scores.sequences]))
    found = defaultdict[str, list[NDArray[np.float64]]](list)
    for one, part in zip(scores.sequences, parts[:-1], strict=True):
        if one.rollout is not None and one.rollout.teacher:
            found[f"teacher_kl/{one.rollout.teacher}/{one.rollout.task.environment}"].append(part[~np.isnan(part)])
    return {name: np.concatenate(values).mean() for name, values in found.items()}


def _staleness(newest: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Pushes between the weights that sampled a token and those that are trained on it, and between the oldest that
    computed a key of its context and those that sampled it."""
    versions, oldest = list[int](), list[int]()
    for segment in (one for rollout in rollouts if rollout.failure != "stale" for one in rollout.tree.segments):
        versions += segment.versions
        oldest += segment.key_versions or segment.versions
    if not versions:
        return {}
    version_T = np.array(versions)
    age_T, key_age_T = newest - version_T, version_T - np.array(oldest)
    shares = np.bincount(np.clip(age_T, 0, MOST_AGED), minlength=MOST_AGED + 1) / len(age_T)
    found = {f"staleness/share_{age}": share for age, share in enumerate(shares) if age_T.max()}
    return found | {
        "staleness/mean": age_T.mean(),
        "staleness/max": age_T.max(),
        "keys/older_frac": (key_age_T > 0).mean(),
        "keys/age_max": key_age_T.max(),
    }
