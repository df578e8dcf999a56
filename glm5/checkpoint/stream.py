"""Weights that come one after the other -> a checkpoint in the published layout, or a running engine.

As `save`, for a model that no process has whole: what is in memory is the tensor that came last, and of a layer's
experts the two that they are stacked in.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from glm5.checkpoint.dtypes import cast, parse_dtype
from glm5.checkpoint.handover import room_for
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.save import MAX_SHARD_BYTES, config_dict, copy_assets, write_checkpoint
from glm5.checkpoint.shard import CODES
from glm5.checkpoint.writer import TensorLayout, write_shards
from glm5.common.errors import CheckpointError
from glm5.config.model import ModelConfig
from glm5.config.tensors import TensorSpec, tensor_specs
from glm5.kernels.block_scaled import FP8, num_blocks, quantize_blocks

Named = Iterable[tuple[str, Tensor]]
"""Parameters and buffers by the model's names, each once, in the order in which `tensor_specs` first names them."""


class Takes(Protocol):
    """An engine, as far as weights go (`LLM`, `AsyncEngine` in its own way)."""

    def update_weights(self, source: Path) -> Any: ...


def save_stream(
    tensors: Named,
    cfg: ModelConfig,
    out_dir: str | Path,
    *,
    held: torch.dtype,
    dtype: str | torch.dtype = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    assets: str | Path | None = None,
) -> Path:
    """As `save`; `held`: the dtype in which matrices come. Errors as there."""
    quantize = dtype == "fp8"
    target = torch.bfloat16 if quantize else held if dtype == "auto" else parse_dtype(dtype, special=("auto", "fp8"))
    layout = [one for spec in tensor_specs(cfg) for one in _layout(spec, target, quantize=quantize)]
    config = config_dict(cfg, target, fp8=quantize)
    add_assets = None if assets is None else partial(copy_assets, Path(assets))
    stored = _stored(tensors, cfg, target, quantize=quantize)
    return write_checkpoint(Path(out_dir), config, layout, stored, add_assets, max_shard_bytes)


def push(tensors: Named, cfg: ModelConfig, engine: Takes, *, held: torch.dtype) -> Any:
    """Put the weights into a running engine, through files in memory of which its ranks read their own parts (by the
    table of placements); what its `update_weights` returns. Raises CheckpointError where nowhere is room."""
    layout = [one for spec in tensor_specs(cfg) for one in _layout(spec, held, quantize=False)]
    room = room_for(sum(one.num_bytes for one in layout))
    folder = Path(tempfile.mkdtemp(prefix="glm5-weights-", dir=room))
    try:
        stored = _stored(tensors, cfg, held, quantize=False)
        write_shards(folder, layout, stored, MAX_SHARD_BYTES, desc="pushing weights")
        return engine.update_weights(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: weights could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _layout(spec: TensorSpec, dtype: torch.dtype, *, quantize: bool) -> list[TensorLayout]:
    if quantize and spec.fp8:
        grid = tuple(num_blocks(size) for size in spec.shape)
        scale = TensorLayout(spec.name + SCALE_SUFFIX, "F32", grid)
        return [TensorLayout(spec.name, CODES[FP8], spec.shape), scale]
    return [TensorLayout(spec.name, CODES[torch.float32 if spec.dtype == "f32" else dtype], spec.shape)]


def _stored(tensors: Named, cfg: ModelConfig, dtype: torch.dtype, *, quantize: bool) -> Iterator[Tensor]:
    """Tensors in the order of the layout."""
    coming, waiting = iter(tensors), dict[str, Tensor]()
    for spec in tensor_specs(cfg):
        slot = slot_of(spec.name)
        while slot.parameter not in waiting:
            name, tensor = next(coming)
            if slot.module != name.rpartition(".")[0] or slot.expert is None:
                waiting.clear()
            waiting[name] = tensor
        weight = slot.view(waiting[slot.parameter])
        if quantize and spec.fp8:
            yield from quantize_blocks(weight)
        else:
            yield cast(weight, torch.float32 if spec.dtype == "f32" else dtype)
    for name, _ in coming:  # whoever sends is to come to the end too
        raise CheckpointError(f"{name}: no tensor of this model's checkpoints")
