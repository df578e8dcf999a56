"""A random checkpoint of any size, written tensor by tensor: nothing larger than one tensor is ever in memory.

Every matrix is normal(0, 1/sqrt(inputs)), which keeps activations and router logits near 1 at any width; embeddings
are normal(0, 1), norms 1, and selection biases small but not zero, so that a mistake with them shows. Each tensor's
numbers follow from its name and the seed alone, whatever else is written.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.dtypes import parse_dtype
from glm5.checkpoint.save import MAX_SHARD_BYTES, config_dict, write_checkpoint
from glm5.checkpoint.shard import CODES
from glm5.checkpoint.writer import TensorLayout
from glm5.config.model import ModelConfig
from glm5.config.tensors import TensorSpec, tensor_specs

BIAS_STD = 0.02  # of e_score_correction_bias, beside sigmoid scores that spread by about 0.2


def write_random(
    cfg: ModelConfig,
    out: str | Path,
    seed: int,
    dtype: str | torch.dtype = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a random checkpoint of `cfg` at `out` and return the directory; errors as those of `save`."""
    stored = parse_dtype(dtype)
    specs = tensor_specs(cfg)
    dtypes = [torch.float32 if spec.dtype == "f32" else stored for spec in specs]
    layout = [TensorLayout(spec.name, CODES[each], spec.shape) for spec, each in zip(specs, dtypes, strict=True)]
    tensors = _tensors(specs, dtypes, seed)
    return write_checkpoint(
        Path(out), config_dict(cfg, stored, fp8=False), layout, tensors, max_shard_bytes=max_shard_bytes
    )


def _tensors(specs: list[TensorSpec], dtypes: list[torch.dtype], seed: int) -> Iterator[Tensor]:
    for spec, dtype in zip(specs, dtypes, strict=True):
        yield random_tensor(spec, seed).to(dtype)


def random_tensor(spec: TensorSpec, seed: int) -> Tensor:
    """The float32 values of one tensor; they depend on its name, shape and `seed` only."""
    if spec.name.endswith("norm.weight"):
        return torch.ones(spec.shape)
    if spec.name.endswith("norm.bias"):
        return torch.zeros(spec.shape)
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    std = BIAS_STD if len(spec.shape) == 1 else 1.0 if spec.part == "embedding" else spec.shape[-1] ** -0.5
    return torch.empty(spec.shape).normal_(0.0, std, generator=generator)
