"""Rollouts as sequences to train on: each path from the root of a tree to a leaf is one, with its tokens and columns.

    policy       weight of the token in the policy's loss: copies / sampled tokens of the rollout ("sequence-mean"), or
                 copies ("token-mean"); 0 for context. Its sum over the step is the denominator.
    entropy      the same, of the entropy; ref_kl the same, of the KL to the reference
    advantage    of the rollout; 0 where a critic gives each token its own later
    rollout      the log-probability that the engine reported; temperature that at which the token was sampled

and where a teacher has scored a rollout of the step

    teacher      its log-probability of the token, NaN where there is none
    teacher_ids, teacher_top   [T, K]: its likeliest tokens and their log-probabilities, -inf beyond what it gave

A sampled segment that several leaves share is trained in the first of their sequences and context in the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from glm5.common.errors import TrainingError
from glm5.kernels.sampled_logprobs import kept_ids
from glm5.rl.algorithms.table import Preset, Reduction
from glm5.rl.rollout import Rollout
from glm5.rl.segments import Experts
from glm5.rl.training.repair import RepairedGroup

Column = NDArray[np.float64]


@dataclass(frozen=True)
class TrainingSequence:
    """Token ids [T], columns [T] by name, and what the engine recorded: `kept`, the mask of each token or b"" for
    all of them, and `experts` [T, MoE layers, experts a token]; None where nothing is recorded.

    `rollout` and `leaf`: where it comes from, a rollout of the step and a segment of its tree.
    """

    ids: NDArray[np.int64]
    columns: dict[str, Column]
    rollout: Rollout | None = None
    leaf: int = 0
    kept: list[bytes] | None = None
    experts: Experts | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def as_context(self) -> "TrainingSequence":
        """The same tokens, of which none is trained."""
        return TrainingSequence(self.ids, {name: np.zeros_like(one) for name, one in self.columns.items()})


def sequences_of_step(groups: Sequence[RepairedGroup], preset: Preset) -> list[TrainingSequence]:
    """All sequences of a step, in the order of groups and rollouts. Raises TrainingError for a reward or a
    log-probability that is not finite, or a record that does not fit its tokens."""
    rollouts = [one for group in groups for one in group.rollouts]
    copies = [number for group in groups for number in group.copies]
    numbers = [number for number, group in enumerate(groups) for _ in group.rollouts]
    for one in rollouts:
        _check(one)
    rewards = torch.tensor([one.reward for one in rollouts], dtype=torch.float64)
    advantages = [0.0] * len(rollouts)
    if preset.advantages is not None:
        advantages = preset.advantages(rewards, torch.tensor(numbers, dtype=torch.int64)).tolist()
    found: list[TrainingSequence] = []
    for one, advantage, number in zip(rollouts, advantages, copies, strict=True):
        if one.is_withheld:
            continue
        found += sequences_of(one, advantage, number, preset.reduction)
    if any(one.teacher for one in rollouts):
        depth = max(len(row) for one in rollouts for each in one.tree.segments for row in [*each.teacher_top, ()])
        for one in found:
            _add_teacher(one, depth)
    return found


def divided(
    groups: Sequence[RepairedGroup], sequences: Sequence[TrainingSequence], count: int
) -> list[list[TrainingSequence]]:
    """The sequences of a step in up to `count` parts of whole groups, as even as can be, for an optimizer step each."""
    parts = min(count, len(groups))
    part_of = {id(one): number % parts for number, group in enumerate(groups) for one in group.rollouts}
    found: list[list[TrainingSequence]] = [[] for _ in range(parts)]
    for one in sequences:
        found[part_of[id(one.rollout)]].append(one)
    return [part for part in found if part]


def sequences_of(rollout: Rollout, advantage: float, copies: int, reduction: Reduction) -> list[TrainingSequence]:
    """The sequences of one rollout that have something to train."""
    tree = rollout.tree
    unit = copies / tree.num_sampled if reduction == "sequence-mean" else float(copies)
    trained: set[int] = set()
    found: list[TrainingSequence] = []
    for leaf in tree.leaves():
        indices = tree.path(leaf)
        new = {index for index in indices if tree.segments[index].is_sampled} - trained
        if not new:
            continue
        trained |= new
        segments = [tree.segments[index] for index in indices]
        ids, units, logprobs, kept = list[int](), list[float](), list[float](), list[bytes]()
        for index, one in zip(indices, segments, strict=True):
            count = len(one.token_ids)
            ids += one.token_ids
            units += [unit if index in new else 0.0] * count
            logprobs += one.logprobs if index in new else [0.0] * count
            kept += one.kept if index in new and one.kept is not None else [b""] * count
        unit_T = np.array(units)
        columns = {
            "policy": unit_T,
            "entropy": unit_T,
            "ref_kl": unit_T,
            "advantage": np.where(unit_T > 0, advantage, 0.0),
            "rollout": np.array(logprobs),
            "temperature": np.full(len(unit_T), rollout.temperature),
        }
        experts = joined_experts([(len(one.token_ids), one.experts) for one in segments])
        recorded = kept if any(kept) else None, experts
        found.append(TrainingSequence(np.array(ids), columns, rollout, leaf, *recorded))
    return found


def _add_teacher(sequence: TrainingSequence, depth: int) -> None:
    """The columns of a teacher, with `depth` likeliest tokens if there are any."""
    assert sequence.rollout is not None
    tree = sequence.rollout.tree
    logprobs, rows = list[float](), list[list[tuple[int, float]]]()
    for index in tree.path(sequence.leaf):
        segment = tree.segments[index]
        logprobs += segment.teacher_logprobs or [math.nan] * len(segment.token_ids)
        rows += segment.teacher_top or [[]] * len(segment.token_ids)
    sequence.columns["teacher"] = np.array(logprobs)
    if depth:
        padded = np.array([row + [(0, -math.inf)] * (depth - len(row)) for row in rows])
        sequence.columns.update({"teacher_ids": padded[..., 0], "teacher_top": padded[..., 1]})


def joined_experts(parts: Sequence[tuple[int, Experts | None]]) -> Experts | None:
    """The records of parts with so many tokens, one after another: -1 where a part has none; None where none has."""
    shape = next((experts.shape[1:] for _, experts in parts if experts is not None), None)
    if shape is None:
        return None
    return np.concatenate([np.full((n, *shape), -1, np.int16) if one is None else one for n, one in parts])


def _check(rollout: Rollout) -> None:
    place = f"task {rollout.task.key} of {rollout.task.environment}, seed {rollout.seed}"
    if not math.isfinite(rollout.reward):
        bad = {name: value for name, value in rollout.rewards.items() if not math.isfinite(value)}
        raise TrainingError(f"{place}: the reward is {rollout.reward} ({bad}); an environment must return finite ones")
    for number, segment in enumerate(rollout.tree.segments):
        if segment.is_sampled and segment.parent is None:
            raise TrainingError(f"{place}: segment {number} is sampled after nothing; a prompt of a token is needed")
        for i, logprob in enumerate(segment.logprobs):
            if not math.isfinite(logprob) or logprob > 0:
                raise TrainingError(
                    f"{place}: the engine's log-probability of token {i} of segment {number} is {logprob}; "
                    "allowed are finite ones of at most 0"
                )
            if segment.kept is not None and segment.kept[i] and segment.token_ids[i] not in kept_ids(segment.kept[i]):
                raise TrainingError(
                    f"{place}: token {segment.token_ids[i]} of segment {number} is not in the vocabulary recorded for "
                    "it; record all of a token's vocabulary, or none"
                )
