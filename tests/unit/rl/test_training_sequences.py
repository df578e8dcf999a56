"""From groups of rollouts to batches: repair, what is trained how often, advantages, denominators, packing."""

import math

import numpy as np
import pytest
import torch

from glm5.common.errors import TrainingError
from glm5.rl.algorithms.table import PRESETS
from glm5.rl.rollout import Group, Rollout
from glm5.rl.segments import Segment
from glm5.rl.training.packing import batches_of, pack
from glm5.rl.training.repair import repair
from glm5.rl.training.sequences import divided, sequences_of, sequences_of_step
from tests.support.masks import recorded_mask
from tests.support.rl_batches import TASK, groups, rollout

GRPO, DIS = PRESETS["grpo"], PRESETS["dis"]


def group(*rewards: float | None) -> Group:
    """A rollout of two sampled tokens for each reward; None: it failed."""
    gen = torch.Generator().manual_seed(len(rewards))
    found = [rollout(gen, 9, [(1, 2)], reward or 0.0) for reward in rewards]
    for one, reward in zip(found, rewards, strict=True):
        one.failure = "sandbox" if reward is None else None
    return Group(0, TASK, found)


def test_groups_are_repaired_as_reported():
    kept, counts = repair([group(1.0, 0.0), group(1.0, None, 0.0, 0.5), group(1.0, None), group(None, None, None)])
    assert [one.copies for one in kept] == [[1, 1], [2, 1, 1]]
    assert (counts.complete, counts.filled, counts.dropped, counts.repeated) == (1, 1, 2, 1)
    assert counts.failures == {"sandbox": 5}
    silent = Group(0, TASK, [Rollout(TASK, 0)])
    assert repair([silent])[1].failures == {"empty": 1}


def test_steps_of_a_batch_divide_it_by_groups():
    """Not by length, which tells rewards apart: every step has a share of all groups, whole ones."""
    kept, _ = repair([group(1.0, 0.0), group(1.0, None), group(0.5, 0.0, 1.0), group(0.0, 0.5), group(0.0, 1.0)])
    sequences = sequences_of_step(kept, GRPO)
    for count, shares in [(1, [[0, 1, 2, 3]]), (3, [[0, 3], [1], [2]]), (9, [[0], [1], [2], [3]])]:
        parts = divided(kept, sequences, count)
        for part, share in zip(parts, shares, strict=True):
            assert [one.rollout for one in part] == [one for number in share for one in kept[number].rollouts]
    assert divided([], [], 2) == []


def test_advantages_are_those_of_distinct_rollouts_and_copies_count_in_the_sums():
    kept, _ = repair([group(1.0, None, 0.0, 0.5)])
    sequences = sequences_of_step(kept, GRPO)
    assert [one.columns["advantage"].max() for one in sequences[::2]] == pytest.approx([1 / (1 + 2e-6), 0], abs=1e-5)
    assert sum(one.columns["policy"].sum() for one in sequences) == 4  # sequences, the repeated one twice
    assert sum(one.columns["policy"].sum() for one in sequences_of_step(kept, DIS)) == 8  # tokens


def test_a_shared_segment_is_trained_once():
    """A tree with a root of context, a sampled segment, and two continuations."""
    made = Rollout(TASK, 3, temperature=0.5)
    root = made.tree.add(Segment([5, 6]))
    shared = made.tree.add(Segment([7, 8], root, True, [-0.1, -0.2], [0, 0]))
    for tokens in ([9], [10, 11]):
        between = made.tree.add(Segment([4], shared))
        made.tree.add(
            Segment(
                tokens,
                between,
                True,
                [-0.3] * len(tokens),
                [0] * len(tokens),
                kept=[recorded_mask([t], 61) for t in tokens],
            )
        )
    first, second = sequences_of(made, 2.0, 1, "sequence-mean")
    assert first.ids.tolist() == [5, 6, 7, 8, 4, 9]
    assert second.ids.tolist() == [5, 6, 7, 8, 4, 10, 11]
    fifth = pytest.approx(0.2)
    assert first.columns["policy"].tolist() == [0, 0, fifth, fifth, 0, fifth]
    assert second.columns["policy"].tolist() == [0, 0, 0, 0, 0, fifth, fifth]
    assert first.columns["rollout"].tolist() == [0, 0, -0.1, -0.2, 0, -0.3]
    assert first.columns["advantage"].tolist() == [0, 0, 2, 2, 0, 2]
    assert first.kept == [*[b""] * 5, recorded_mask([9], 61)]
    assert sum(one.columns["policy"].sum() for one in (first, second)) == pytest.approx(1)


def test_what_is_not_finite_or_does_not_fit_is_named():
    def refused(change, match: str) -> None:
        one = group(1.0, 0.0)
        change(one.rollouts[1])
        with pytest.raises(TrainingError, match=match):
            sequences_of_step(repair([one])[0], GRPO)

    def sampled(of: Rollout) -> Segment:
        return of.tree.segments[1]

    refused(lambda of: of.rewards.update(all=math.nan), r"task \w+ of none, seed 0: the reward is nan")
    refused(
        lambda of: sampled(of).logprobs.__setitem__(1, -math.inf), "log-probability of token 1 of segment 1 is -inf"
    )
    refused(
        lambda of: setattr(sampled(of), "kept", [b"", recorded_mask([98], 100)]),
        "not in the vocabulary recorded for it",
    )
    refused(lambda of: setattr(sampled(of), "parent", None), "segment 1 is sampled after nothing")


@pytest.mark.parametrize("num_shards", [1, 2, 4, 7])
@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
def test_packing_trains_every_token_once_on_equally_many_batches(max_tokens, num_shards):
    sequences = sequences_of_step(repair(groups(1, 50, kept=True))[0], GRPO)
    packed = pack(sequences, max_tokens, num_shards)
    assert len({len(batches) for batches in packed}) == 1
    for batches in packed:
        for batch in batches:
            longest = max(len(sequences[i]) for i in batch)
            assert len(batch) * longest <= max_tokens or len(batch) == 1
    batches = [one for shard in range(num_shards) for one in batches_of(sequences, packed, shard)]
    tokens = [
        (int(i), float(p), float(u))
        for batch in batches
        for i, p, u in zip(batch.ids_T, batch.columns["rollout"], batch.columns["policy"], strict=True)
        if u
    ]
    want = [
        (int(i), float(p), float(u))
        for one in sequences
        for i, p, u in zip(one.ids, one.columns["rollout"], one.columns["policy"], strict=True)
        if u
    ]
    assert sorted(tokens) == sorted(want)
    for batch in batches:
        chosen = batch.targets_of(("policy",))
        if len(chosen.index_G) == 0:  # context, where there are fewer sequences than batches
            continue
        assert chosen.kept is not None
        assert np.array_equal(chosen.kept.count_T > 0, chosen.columns["policy"] > 0)
