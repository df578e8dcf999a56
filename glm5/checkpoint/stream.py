"""A stream of weights -> a checkpoint in the published layout, or a running engine.

Like `save`, for a model that no process holds completely: memory holds the current tensor, and for experts the two
stacked tensors of a layer.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from glm5.checkpoint.dtypes import cast, parse_dtype
from glm5.checkpoint.handover import TensorStream
from glm5.checkpoint.names import slot_of
from glm5.checkpoint.save import MAX_SHARD_BYTES, config_dict, copy_assets, tensor_layouts, write_checkpoint
from glm5.common.errors import CheckpointError
from glm5.config.model import ModelConfig
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import quantize_blocks

NamedTensors = Iterable[tuple[str, Tensor]]
"""Parameters and buffers by the model's names, each once, in the order in which `tensor_specs` first names them."""


class WeightReceiver(Protocol):
    """An engine whose weights can be replaced (`LLM`; `AsyncEngine` likewise)."""

    def update_weights(self, source: TensorStream) -> Any: ...


def save_stream(
    tensors: NamedTensors,
    cfg: ModelConfig,
    out_dir: str | Path,
    *,
    held: torch.dtype,
    dtype: str | torch.dtype = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    assets: str | Path | None = None,
) -> Path:
    """Write `tensors` as `save` writes a model; raises what `save` raises. `held`: the dtype of the given matrices."""
    quantize = dtype == "fp8"
    target = torch.bfloat16 if quantize else held if dtype == "auto" else parse_dtype(dtype, special=("auto", "fp8"))
    layout = [each for spec in tensor_specs(cfg) for each in tensor_layouts(spec, target, fp8=quantize and spec.fp8)]
    config = config_dict(cfg, target, fp8=quantize)
    add_assets = None if assets is None else partial(copy_assets, Path(assets))
    stored = _stored(tensors, cfg, target, quantize=quantize)
    return write_checkpoint(Path(out_dir), config, layout, stored, add_assets, max_shard_bytes)


def push(tensors: NamedTensors, cfg: ModelConfig, engine: WeightReceiver, *, held: torch.dtype) -> Any:
    """Replace the weights of a running engine; returns what its `update_weights` returns.

    The weights go through shared memory, from which each rank of the engine reads its own part.
    """
    layout = [each for spec in tensor_specs(cfg) for each in tensor_layouts(spec, held, fp8=False)]
    return engine.update_weights(TensorStream(layout, _stored(tensors, cfg, held, quantize=False)))


def _stored(tensors: NamedTensors, cfg: ModelConfig, dtype: torch.dtype, *, quantize: bool) -> Iterator[Tensor]:
    """The tensors on disk, in the order of the layout."""
    remaining, current = iter(tensors), dict[str, Tensor]()
    for spec in tensor_specs(cfg):
        slot = slot_of(spec.name)
        while slot.parameter not in current:
            name, tensor = next(remaining)
            if slot.module != name.rpartition(".")[0] or slot.expert is None:
                current.clear()
            current[name] = tensor
        weight = slot.view(current[slot.parameter])
        if quantize and spec.fp8:
            yield from quantize_blocks(weight)
        else:
            yield cast(weight, torch.float32 if spec.dtype == "f32" else dtype)
    for name, _ in remaining:  # run the sender to its end, too
        raise CheckpointError(f"{name}: not a tensor of this model's checkpoints")
