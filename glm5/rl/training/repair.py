"""Groups of which some rollouts failed (GLM-5 report, section 4.1.2).

    more than half valid    valid rollouts are repeated until the group is complete again
    else                    the group is dropped

A repeated rollout is a copy in the sums, not in the batches: it is trained once, with twice the weight. Advantages are
computed over the distinct ones.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from glm5.rl.rollout import Group, Rollout


@dataclass(frozen=True)
class RepairedGroup:
    """`rollouts`: the valid ones, each once; `copies`: how often each one counts, in sum the size of the group."""

    group: Group
    rollouts: list[Rollout]
    copies: list[int]


@dataclass
class Repairs:
    """Counts of a step: groups that were complete, filled and dropped; rollouts that were repeated; and rollouts that
    failed, by kind ("empty": no token was sampled)."""

    complete: int = 0
    filled: int = 0
    dropped: int = 0
    repeated: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])


def num_dropped(groups: Sequence[Group]) -> int:
    """Draws of which a group is dropped; in self-play a draw has several."""
    kept = {id(one.group) for one in repair(groups)[0]}
    return len({group.number for group in groups if id(group) not in kept})


def repair(groups: Sequence[Group]) -> tuple[list[RepairedGroup], Repairs]:
    """The groups that can be trained on, in order."""
    kept: list[RepairedGroup] = []
    counts = Repairs()
    for group in groups:
        valid = [one for one in group.rollouts if _is_whole(one)]
        if len(valid) < len(group.rollouts):
            counts.failures.update(one.failure or "empty" for one in group.rollouts if not _is_whole(one))
        missing = len(group.rollouts) - len(valid)
        if len(valid) <= missing:
            counts.dropped += 1
            continue
        counts.complete += not missing
        counts.filled += bool(missing)
        counts.repeated += missing
        # Fewer are missing than valid, so the first ones are repeated once. Their order does not depend on rewards.
        kept.append(RepairedGroup(group, valid, [1 + (i < missing) for i in range(len(valid))]))
    return kept, counts


def _is_whole(rollout: Rollout) -> bool:
    return rollout.is_valid and rollout.tree.num_sampled > 0
