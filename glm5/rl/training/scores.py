"""What a training step computed of its tokens, beside what the rollouts say of them.

The sequences of a step are numbered token by token (column "place"), so that each pass's results find their rollout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from glm5.rl.records.trace import Columns
from glm5.rl.rollout import Group
from glm5.rl.training.objective import Scored
from glm5.rl.training.sequences import TrainingSequence
from glm5.train.batch import Batch

Column = NDArray[np.float64]
_OF_BATCHES = {"rollout": "logprobs", "reference": "reference_logprobs"}
_OF_NODES = ("trainer_logprobs", "entropies", "weights", "masked", "advantages", "reference_logprobs")


@dataclass(frozen=True)
class Scores:
    """Columns by name, one entry for each token of a step's sequences, NaN where it was not trained: trainer_logprobs,
    entropies, weights (0 where masked), masked (0 or 1), advantages, logprobs (the rollout's), reference_logprobs, and
    teacher_kl (NaN where there is no teacher)."""

    sequences: Sequence[TrainingSequence]
    columns: Mapping[str, Column]

    def of_trained(self, name: str) -> Column:
        """The column's entries of trained tokens."""
        return self.columns[name][~np.isnan(self.columns["trainer_logprobs"])]

    def by_segment(self, groups: Sequence[Group]) -> list[list[list[Columns | None]]]:
        """For each group, rollout and segment its columns, None where it was not trained."""
        found: dict[int, list[Columns | None]] = {
            id(one): [None] * len(one.tree.segments) for group in groups for one in group.rollouts
        }
        is_trained = ~np.isnan(self.columns["trainer_logprobs"])
        names = [name for name in _OF_NODES if name in self.columns]
        first = 0
        for sequence in self.sequences:
            assert sequence.rollout is not None
            tree = sequence.rollout.tree
            for index in tree.path(sequence.leaf):
                last = first + len(tree.segments[index].token_ids)
                if tree.segments[index].is_sampled and is_trained[first:last].all():
                    columns = {name: self.columns[name][first:last].tolist() for name in names}
                    found[id(sequence.rollout)][index] = columns
                first = last
        return [[found[id(one)] for one in group.rollouts] for group in groups]


class ScoreKeeper:
    """Collects the results of a step's passes: the objective's `on_scored`."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []

    def __call__(self, batch: Batch, scored: Scored) -> None:
        columns = {
            "trainer_logprobs": scored.logprob_G,
            "entropies": scored.entropy_G,
            "weights": scored.weight_G,
            "masked": scored.masked_G,
            "advantages": scored.advantage_G,
        }
        columns |= {} if scored.teacher_kl_G is None else {"teacher_kl": scored.teacher_kl_G}
        columns |= {
            ours: batch.columns[name][scored.index_G] for name, ours in _OF_BATCHES.items() if name in batch.columns
        }
        self._parts.append((batch.columns["place"][scored.index_G].long(), columns))

    def take(self, count: int) -> dict[str, Column]:
        """The columns of all passes since the last call, for `count` tokens: here they come to the host."""
        columns = dict[str, Column]()
        for place_G, of_batch in self._parts:
            for name, values in of_batch.items():
                column = columns.setdefault(name, np.full(count, np.nan))
                column[place_G.numpy()] = values.double().cpu().numpy()
        self._parts.clear()
        return columns


def number_tokens(sequences: Sequence[TrainingSequence]) -> None:
    """Give all sequences of a step the column "place"."""
    first = 0
    for one in sequences:
        one.columns["place"] = np.arange(first, first + len(one), dtype=np.float64)
        first += len(one)
