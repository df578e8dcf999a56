"""Tensors in memory -> a short-lived folder that another process reads (`update.stage`): no more than the files.

Names are those on disk, or those of the model's `state_dict`, in which experts are stacked.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from glm5.checkpoint.names import SCALE_SUFFIX, STACKED
from glm5.checkpoint.save import MAX_SHARD_BYTES
from glm5.checkpoint.shard import CODES
from glm5.checkpoint.writer import TensorLayout, write_shards
from glm5.common.errors import CheckpointError

_MEMORY = Path("/dev/shm")  # files that never reach a disk
_SPARE = 1.02  # headers, and blocks that are not full


def hand_over(tensors: Mapping[str, Tensor]) -> Path:
    """Write `tensors` into a new folder, in memory where there is room, and return it; the reader removes it.

    Raises CheckpointError when there are none, when one has a dtype that no checkpoint has, or when nowhere is room.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"weights hold {name!r:.60}: {tensor!r:.60}; allowed: tensors by name")
    parts = list(_on_disk(tensors))
    if not parts:
        raise CheckpointError("no tensors were given to update the weights with")
    if odd := [f"{name} is {tensor.dtype}" for name, tensor in parts if tensor.dtype not in CODES]:
        raise CheckpointError(f"{odd[0]}; allowed: {', '.join(str(dtype) for dtype in CODES)}")
    layout = [TensorLayout(name, CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in parts]
    folder = Path(tempfile.mkdtemp(prefix="glm5-weights-", dir=room_for(sum(each.num_bytes for each in layout))))
    try:
        write_shards(folder, layout, (tensor for _, tensor in parts), MAX_SHARD_BYTES, desc="handing over weights")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{folder}: weights could not be written: {error.strerror or error}") from error
        raise
    return folder


def room_for(num_bytes: int) -> Path:
    """A folder with room for so much, in memory if it can be. Raises CheckpointError where there is none."""
    places = [_MEMORY, Path(tempfile.gettempdir())]
    free = {place: shutil.disk_usage(place).free for place in places if place.is_dir()}
    for place, room in free.items():
        if num_bytes * _SPARE <= room:
            return place
    found = ", ".join(f"{room:,} in {place}" for place, room in free.items())
    raise CheckpointError(f"the weights take {num_bytes:,} bytes, and free are {found}; set TMPDIR to a larger folder")


def _on_disk(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor under its name on disk; of stacked experts, each expert's projections."""
    for name, tensor in tensors.items():
        experts, _, leaf = name.rpartition(".")
        scale = SCALE_SUFFIX if leaf.endswith(SCALE_SUFFIX) else ""
        parts = [key for key, (parameter, _, _) in STACKED.items() if parameter == leaf.removesuffix(SCALE_SUFFIX)]
        if not experts.endswith(".mlp.experts") or not parts:
            yield name, tensor
            continue
        for expert, stacked in enumerate(tensor):
            for projection in parts:
                _, part, num_parts = STACKED[projection]
                yield f"{experts}.{expert}.{projection}.weight{scale}", stacked.chunk(num_parts)[part]
