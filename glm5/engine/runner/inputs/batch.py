"""The rows of a step in static shapes, as plain arrays that a runner uploads.

Rows are in the order of the plan's sequences. A step of decoding sequences only has 1 + depth rows for each of a
bucket of sequences, any other step a bucket of rows. Padding rows belong to the padding slot.

    T   rows of the step; `sample_*_T`: of those, the rows that sample
    B   sequences with rows, and one for padding; `sampling_slot_B`, `first_B`, `sample_index_B`: those that sample
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm5.common.rounding import next_power_of_two
from glm5.engine.scheduler.plan import Bucket, StepPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Arrays of one step, int64.

    `start_T`: position of the sequence's first row, -1 if only the device knows it (decoding); `offset_T` counts from
    there. `group_T`: index of the row's sequence in `slot_B`. `sample_T`: the rows that sample, with their slot and the
    number of drafts before them; `first_B`: each sampling sequence's first such row, as a row of the step, and
    `sample_index_B` as an index into `sample_T`. Padding comes last everywhere. `samples_all`: every row belongs to a
    decoding sequence, and samples. `full_prompts`: every row belongs to a full prompt, which begins with row `first_T`
    (for padding, beyond the last row); `first_T` is empty in steps without prompts.
    """

    slot_B: Ints
    group_T: Ints
    slot_T: Ints
    start_T: Ints
    offset_T: Ints
    live_T: Ints
    sample_T: Ints
    sample_slot_T: Ints
    sample_offset_T: Ints
    sampling_slot_B: Ints
    first_B: Ints
    sample_index_B: Ints
    first_T: Ints
    samples_all: bool
    full_prompts: bool


class Packer:
    """Makes batches. While the same sequences decode, it returns the same object.

    `round_up` rounds a number of rows up to whole passes of the model.
    """

    def __init__(self, padding_slot: int, round_up: Callable[[int], int]):
        self._padding_slot, self._round_up = padding_slot, round_up
        self._last: tuple[object, Batch] | None = None

    def pack(self, plan: StepPlan) -> Batch:
        """The batch of a plan that has items."""
        bucket = plan.bucket
        assert bucket is not None, f"{plan.step=}"
        if not bucket.decodes_only:
            return _pack(plan, bucket, self._padding_slot, self._round_up)
        key = bucket, plan.depth, plan.items
        if self._last is None or self._last[0] != key:
            self._last = key, _pack(plan, bucket, self._padding_slot, self._round_up)
        return self._last[1]


def _pack(plan: StepPlan, bucket: Bucket, padding_slot: int, round_up: Callable[[int], int]) -> Batch:
    items = plan.items
    slots = np.fromiter((item.slot for item in items), np.int64, len(items))
    counts = np.fromiter((item.num_rows for item in items), np.int64, len(items))
    starts = np.fromiter((item.start for item in items), np.int64, len(items))
    decodes = np.fromiter((item.kind == "decode" for item in items), np.bool_, len(items))
    samples = np.fromiter((item.samples for item in items), np.bool_, len(items))
    num_groups = bucket.num_seqs

    if bucket.decodes_only:
        width = 1 + bucket.depth
        group_T = np.repeat(np.arange(num_groups), width)
        offset_T = np.tile(np.arange(width), num_groups)
        group_T[offset_T >= padded(counts, num_groups)[group_T]] = num_groups
    else:
        group_T = np.full(bucket.num_tokens, num_groups)
        group_T[: plan.num_tokens] = np.repeat(np.arange(len(items)), counts)
        offset_T = np.arange(bucket.num_tokens) - padded(np.cumsum(counts) - counts, num_groups + 1)[group_T]
    num_rows = round_up(len(group_T))
    group_T, offset_T = padded(group_T, num_rows, num_groups), padded(offset_T, num_rows)
    live_T = group_T < num_groups
    offset_T *= live_T

    first_T = np.zeros(0, np.int64)
    if not bucket.decodes_only:
        first_T = np.append(np.cumsum(counts) - counts, num_rows)[np.minimum(group_T, len(items))]
    first_rows = np.arange(len(items)) * (1 + bucket.depth) if bucket.decodes_only else np.cumsum(counts) - counts
    first_rows = np.where(decodes, first_rows, first_rows + counts - 1)[samples]
    num_sampled = np.where(decodes, counts, 1)[samples]
    if bucket.decodes_only:
        sample_T, sample_slot_T = np.arange(num_rows), padded(slots, num_groups + 1, padding_slot)[group_T]
        sample_offset_T, place = offset_T, first_rows
    else:
        place = np.cumsum(num_sampled) - num_sampled
        sample_offset_T = np.arange(num_sampled.sum()) - np.repeat(place, num_sampled)
        sample_T = np.repeat(first_rows, num_sampled) + sample_offset_T
        sample_slot_T = np.repeat(slots[samples], num_sampled)
    num_sampling = len(first_rows)
    num_places = num_groups if bucket.decodes_only else next_power_of_two(num_sampling)
    num_sampling_seqs = round_up(num_places) if num_sampling else 0
    num_sampled_rows = round_up(num_places * (1 + plan.depth)) if num_sampling else 0
    num_sampled_rows = num_rows if bucket.decodes_only else num_sampled_rows
    return Batch(
        slot_B=padded(slots, num_groups + 1, padding_slot),
        group_T=group_T,
        slot_T=padded(slots, num_groups + 1, padding_slot)[group_T],
        start_T=padded(starts, num_groups + 1)[group_T],
        offset_T=offset_T,
        live_T=live_T.astype(np.int64),
        sample_T=padded(sample_T, num_sampled_rows),
        sample_slot_T=padded(sample_slot_T, num_sampled_rows, padding_slot),
        sample_offset_T=padded(sample_offset_T, num_sampled_rows),
        sampling_slot_B=padded(slots[samples], num_sampling_seqs, padding_slot),
        first_B=padded(first_rows, num_sampling_seqs),
        sample_index_B=padded(place, num_sampling_seqs),
        first_T=first_T,
        samples_all=bucket.decodes_only,
        full_prompts=not decodes.any() and not starts.any(),
    )


def padding_batch(num_rows: int, num_seqs: int, padding_slot: int, *, decodes_only: bool) -> Batch:
    """Padding rows only: in the shape of a step whose sequences all decode, where every row samples, or of a step with
    prompts, of which none samples."""
    num_sampled, num_sampling = (num_rows, num_seqs) if decodes_only else (0, 0)

    def full(count: int, value: int = 0) -> Ints:
        return np.full(count, value, dtype=np.int64)

    return Batch(
        slot_B=full(num_seqs + 1, padding_slot),
        group_T=full(num_rows, num_seqs),
        slot_T=full(num_rows, padding_slot),
        start_T=full(num_rows),
        offset_T=full(num_rows),
        live_T=full(num_rows),
        sample_T=np.arange(num_sampled),
        sample_slot_T=full(num_sampled, padding_slot),
        sample_offset_T=full(num_sampled),
        sampling_slot_B=full(num_sampling, padding_slot),
        first_B=full(num_sampling),
        sample_index_B=full(num_sampling),
        first_T=full(0 if decodes_only else num_rows, num_rows),
        samples_all=decodes_only,
        full_prompts=False,
    )


def padded(values: Ints, length: int, fill: int = 0) -> Ints:
    """`values` followed by `fill` up to `length`."""
    if len(values) == length:
        return values
    out = np.full(length, fill, dtype=np.int64)
    out[: len(values)] = values
    return out


def arrays(batch: Batch) -> Sequence[Ints]:
    """The arrays to upload, in the order of their fields."""
    return [value for value in vars(batch).values() if isinstance(value, np.ndarray)]
