"""Tensors in memory -> a temporary folder of safetensors files that another process reads (`update.stage`).

Names are those on disk, or those of the model's `state_dict`, in which experts are stacked.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from glm5.checkpoint.names import SCALE_SUFFIX, STACKED
from glm5.checkpoint.save import MAX_SHARD_BYTES
from glm5.checkpoint.shard import CODES
from glm5.checkpoint.writer import TensorLayout, write_shards
from glm5.common.errors import CheckpointError

_SHARED_MEMORY = Path("/dev/shm")  # files here are never written to a disk
_OVERHEAD = 1.02  # headers and partly filled blocks


def hand_over(tensors: Mapping[str, Tensor]) -> Path:
    """Write `tensors` into a new folder, in memory if there is space, and return it; the reader removes it.

    Raises CheckpointError when there are no tensors, when a dtype cannot be stored, or when there is no space.
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
    return write_temporary(layout, (tensor for _, tensor in parts), desc="handing over weights")


def write_temporary(layout: Sequence[TensorLayout], tensors: Iterable[Tensor], desc: str) -> Path:
    """Write `tensors`, in the order of `layout`, into a new folder, which the caller removes. `desc`: for the progress
    bar. Raises CheckpointError when there is no space or writing fails; nothing is left then."""
    parent = _parent_with_space(sum(each.num_bytes for each in layout))
    folder = Path(tempfile.mkdtemp(prefix="glm5-weights-", dir=parent))
    try:
        write_shards(folder, layout, tensors, MAX_SHARD_BYTES, desc=desc)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{folder}: weights could not be written: {error.strerror or error}") from error
        raise
    return folder


def _parent_with_space(num_bytes: int) -> Path:
    parents = [_SHARED_MEMORY, Path(tempfile.gettempdir())]
    free = {parent: shutil.disk_usage(parent).free for parent in parents if parent.is_dir()}
    for parent, num_free in free.items():
        if num_bytes * _OVERHEAD <= num_free:
            return parent
    found = ", ".join(f"{num_free:,} in {parent}" for parent, num_free in free.items())
    raise CheckpointError(f"the weights take {num_bytes:,} bytes, and free are {found}; set TMPDIR to a larger folder")


def _on_disk(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their names on disk; stacked experts are split into the projections of each expert."""
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
