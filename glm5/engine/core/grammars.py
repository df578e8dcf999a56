"""Grammar bitmasks of a step: the tokens that each row of a constrained sequence may sample."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from glm5.engine.core.replies import Reply
from glm5.engine.scheduler.plan import Item


def fill_masks(
    items: Sequence[Item], constrained: Mapping[int, Reply], max_depth: int, vocab_size: int
) -> tuple[list[int], Tensor] | None:
    """Slots of the step's sequences with a grammar, and the bitmasks of their rows; None if there are none.

    int32 [slots, 1 + max_depth, ceil(W / 32)], one bit a token. A row's mask assumes that the drafts before it are
    accepted.
    """
    rows = [(item, constrained[item.seq_id]) for item in items if item.samples and item.seq_id in constrained]
    if not rows:
        return None
    bitmasks = torch.empty(len(rows), 1 + max_depth, -(-vocab_size // 32), dtype=torch.int32)
    for (item, reply), bitmask in zip(rows, bitmasks, strict=True):
        assert reply.matcher is not None
        # A prompt chunk samples one token, whatever was drafted before its sequence was preempted.
        reply.matcher.fill(reply.drafts[: item.depth], bitmask)
    return [item.slot for item, _ in rows], bitmasks
