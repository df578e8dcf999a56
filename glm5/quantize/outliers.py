"""The same model, harder to quantize: some channels of activations made larger, the weights that read them smaller.

    source * factor, targets / factor on a few channels of every subgraph           (smoothing, the wrong way round)

Real models have such channels; one trained for minutes has none.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.names import STACK, place_of
from glm5.checkpoint.save import copy_assets, write_checkpoint
from glm5.checkpoint.shard import CODES
from glm5.checkpoint.writer import TensorLayout
from glm5.config.model import ModelConfig
from glm5.quant.fuse import smooth
from glm5.quant.graph import SUBGRAPHS
from glm5.quantize.source import Layer, Source

SHARE = 32  # one channel in so many


def inject(model: str | Path, out: Path, factor: float, seed: int) -> Path:
    """Write the model with outliers at `out`, in float32 so that nothing else changes; returns `out`."""
    source = Source(model)
    specs = [spec for layer_idx in source.layer_indices for spec in source.specs(layer_idx)]
    layout = [TensorLayout(spec.name, CODES[torch.float32], spec.shape) for spec in specs]

    def tensors() -> Iterator[Tensor]:
        for layer_idx, layer in source.ahead(source.layer_indices):
            made = with_outliers({name: tensor.float() for name, tensor in layer.items()}, source.cfg, factor, seed)
            for spec in source.specs(layer_idx):
                place = place_of(spec.name)
                held = made[place.name]
                yield held if place.expert is None else held[place.expert]

    config = source.cfg.to_dict() | {"dtype": "float32"}
    config.pop("quantization_config", None)
    return write_checkpoint(out, config, layout, tensors(), partial(copy_assets, source.directory))


def with_outliers(layer: Layer, cfg: ModelConfig, factor: float, seed: int) -> Layer:
    """A layer's tensors with outliers in every subgraph that it has."""
    generator = torch.Generator().manual_seed(seed)
    held = dict(layer)
    for subgraph in SUBGRAPHS:
        name = f"{subgraph.source}.weight"
        if name not in held:
            continue
        width = cfg.num_attention_heads * cfg.v_head_dim if subgraph.kind == "ov" else held[name].shape[-2:][0]
        lead = held[name].shape[:1] if subgraph.source.startswith(STACK) else ()
        chosen = torch.rand((*lead, width), generator=generator).argsort(-1) < max(1, width // SHARE)
        scale = torch.where(chosen, 1 / factor, 1.0)
        held |= smooth(held, cfg, subgraph, scale)[0]
    return held
