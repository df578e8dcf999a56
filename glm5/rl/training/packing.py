"""Sequences packed into batches, as many for each rank as for the others.

Sequences of similar length share a batch, because a pass pads its keys to the longest: a batch has at most `max_tokens`
tokens so padded, or one sequence. The packing depends on nothing but the sequences.
"""

from collections.abc import Sequence, Sized

import numpy as np
import torch

from glm5.kernels.sampled_logprobs import Kept
from glm5.rl.training.sequences import TrainingSequence, joined_experts
from glm5.train.batch import Batch


def pack(sequences: Sequence[Sized], max_tokens: int, num_shards: int = 1) -> list[list[list[int]]]:
    """For each of `num_shards` ranks with rows of their own, its batches as lists of numbers of sequences.

    Every rank has the same number of batches, as passes that exchange parameters need. Where there are too few
    sequences, some come twice: the second time they must be context (`batches_of`).
    """
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * len(sequences[batches[-1][0]]) <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    while len(batches) % num_shards:
        longest = max(range(len(batches)), key=lambda b: (len(batches[b]) > 1, _padded(sequences, batches[b]), -b))
        whole = batches[longest]
        if len(whole) == 1:
            batches.append([order[-1]])
        else:
            batches[longest : longest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return [batches[shard::num_shards] for shard in range(num_shards)]


def batches_of(
    sequences: Sequence[TrainingSequence], packed: Sequence[Sequence[Sequence[int]]], shard: int
) -> list[Batch]:
    """The batches of one shard of what `pack` returned. A sequence is trained where it comes first."""
    seen: set[int] = set()
    found: list[Batch] = []
    for number, batches in enumerate(packed):
        for indices in batches:
            chosen = [sequences[i].as_context() if i in seen else sequences[i] for i in indices]
            seen.update(indices)
            if number == shard:
                found.append(batch_of(chosen))
    return found


def batch_of(sequences: Sequence[TrainingSequence]) -> Batch:
    """One batch of these sequences, without cross-entropy, in host memory."""
    ids_T = torch.from_numpy(np.concatenate([one.ids for one in sequences]))
    columns = {
        name: torch.from_numpy(np.concatenate([one.columns[name] for one in sequences]))
        for name in sequences[0].columns
    }
    if (experts := joined_experts([(len(one), one.experts) for one in sequences])) is not None:
        columns["experts"] = torch.from_numpy(experts)
    kept = None
    if any(one.kept is not None for one in sequences):
        masks = [mask for one in sequences for mask in (one.kept or [b""] * len(one))]
        kept = Kept.of(masks)
    return Batch(ids_T, torch.zeros(len(ids_T)), [len(one) for one in sequences], columns=columns, kept=kept)


def _padded(sequences: Sequence[Sized], batch: Sequence[int]) -> int:
    return len(batch) * max(len(sequences[i]) for i in batch)
