"""Rollouts without an engine: trees of random tokens, and the batches of a reinforcement-learning step."""

import torch

from glm5.rl.algorithms.table import Preset
from glm5.rl.environments.protocol import Task
from glm5.rl.rollout import Group, Rollout
from glm5.rl.segments import Segment
from glm5.rl.training.repair import repair
from glm5.rl.training.sequences import TrainingSequence, sequences_of_step
from tests.support.masks import recorded_mask

TASK = Task("none", 0, 0, (), {})


def rollout(
    gen: torch.Generator, vocab: int, turns: list[tuple[int, int]], reward: float, *, kept: bool = False
) -> Rollout:
    """Turns of (context tokens, sampled tokens)."""
    made = Rollout(TASK, 0, rewards={"all": reward}, temperature=0.8)
    parent = None
    for num_context, num_sampled in turns:
        for count, is_sampled in ((num_context, False), (num_sampled, True)):
            segment = Segment(torch.randint(2, vocab, (count,), generator=gen).tolist(), parent, is_sampled)
            if is_sampled:
                segment.logprobs = (-3 * torch.rand(count, generator=gen) - 0.5).tolist()
                segment.versions = [0] * count
                if kept:
                    more = torch.randint(2, vocab, (count, 9), generator=gen).tolist()
                    ids = ([one, *row] for one, row in zip(segment.token_ids, more, strict=True))
                    segment.kept = [recorded_mask(each, vocab) for each in ids]
            parent = made.tree.add(segment)
    return made


def groups(seed: int, vocab: int, *, kept: bool = False) -> list[Group]:
    """Two groups of four rollouts of different lengths."""
    gen = torch.Generator().manual_seed(seed)
    shapes = [[(3, 5)], [(4, 1), (2, 6)], [(7, 9)], [(2, 2), (1, 1), (3, 4)]]
    return [
        Group(
            number,
            TASK,
            [rollout(gen, vocab, turns, float(i % 3 == number), kept=kept) for i, turns in enumerate(shapes)],
        )
        for number in range(2)
    ]


def sequences(seed: int, vocab: int, preset: Preset, *, kept: bool = False) -> list[TrainingSequence]:
    """With the columns that all five streams need."""
    found = sequences_of_step(repair(groups(seed, vocab, kept=kept))[0], preset)
    gen = torch.Generator().manual_seed(seed + 1)
    for one in found:
        trained = one.columns["policy"] > 0
        for name, shift in (("old", 0.1), ("reference", 0.3)):
            one.columns[name] = one.columns["rollout"] + shift * trained * torch.randn(len(one), generator=gen).numpy()
        one.columns["value"] = trained * torch.rand(len(one), generator=gen).double().numpy()
        one.columns["return"] = torch.randn(len(one), generator=gen).double().numpy()
    return found
