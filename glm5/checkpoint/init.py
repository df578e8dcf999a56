"""A random checkpoint of any size, written tensor by tensor: memory holds at most one tensor.

Matrices are normal(0, 1/sqrt(inputs)), which keeps activations and router logits near 1 at any width. Embeddings are
normal(0, 1) and norms 1. Selection biases are small but not zero, so that tests notice errors with them. FP8 weights
are uniform over e4m3 codes. The values of a tensor depend on its name and the seed only. Tensors of more than a few
million elements are strided views of one shared buffer, so that writing runs at disk speed. A byte-level tokenizer
trained on a few sentences is written too, so that the checkpoint can be served; the config gets its end-of-text ids.
"""

import hashlib
import logging
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer, train_bpe
from glm5.checkpoint.dtypes import parse_dtype
from glm5.checkpoint.save import MAX_SHARD_BYTES, config_dict, tensor_layouts, write_checkpoint
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.tensors import TensorSpec, tensor_specs
from glm5.kernels.block_scaled import FP8, num_blocks

logger = logging.getLogger(__name__)

E4M3_RMS = 130.0  # of a uniform draw from e4m3's finite values
_TILE = 1 << 22  # elements of the shared buffer
BIAS_STD = 0.02  # of e_score_correction_bias; the sigmoid scores have a standard deviation of about 0.2
TOKENIZER_TEXT = """
Hello! How can I help you today? Please tell me what you would like to know about the weather in the city.
The quick brown fox jumps over the lazy dog, and then it sleeps in the warm light of the afternoon sun.
There are many ways to say the same thing; some of them are short, and others are not short at all.
First think about the question, then look at the numbers, and only then write the answer in one sentence.
You are an assistant who answers with care. Call the tool with the name of the city and the unit of temperature.
def main(arguments: list[str]) -> int: return sum(int(value) for value in arguments if value.isdigit())
{"name": "get_weather", "description": "The weather of a city", "parameters": {"type": "object", "properties": {}}}
"""


def write_random(
    cfg: ModelConfig,
    out: str | Path,
    seed: int,
    dtype: str | torch.dtype = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    fp8: bool = False,
) -> Path:
    """Write a random checkpoint of `cfg` at `out` and return the directory. Raises what `save` raises.

    `fp8`: weights have block scales where a published FP8 checkpoint has them; the others have `dtype`.
    """
    stored = parse_dtype(dtype)
    cfg, tokenizer = _with_tokenizer(cfg)
    specs = tensor_specs(cfg)
    layout = [entry for spec in specs for entry in tensor_layouts(spec, stored, fp8=fp8 and spec.fp8)]
    return write_checkpoint(
        Path(out),
        config_dict(cfg, stored, fp8=fp8),
        layout,
        _tensors(specs, stored, seed, fp8=fp8),
        add_assets=tokenizer.save if tokenizer else None,
        max_shard_bytes=max_shard_bytes,
    )


def write_weightless(
    cfg: ModelConfig, out: str | Path, dtype: str | torch.dtype = "bfloat16", *, fp8: bool = True
) -> Path:
    """As `write_random`, but without weights: for an engine that makes its own (load_format dummy)."""
    cfg, tokenizer = _with_tokenizer(cfg)
    config = config_dict(cfg, parse_dtype(dtype), fp8=fp8)
    return write_checkpoint(Path(out), config, [], [], add_assets=tokenizer.save if tokenizer else None)


def _with_tokenizer(cfg: ModelConfig) -> tuple[ModelConfig, Tokenizer | None]:
    """`cfg` with the token ids of a new tokenizer, and that tokenizer."""
    tokenizer = _tokenizer(cfg.vocab_size)
    if tokenizer is not None:
        cfg = cfg.replace(eos_token_id=list(tokenizer.eos_ids), pad_token_id=tokenizer.pad_id)
    return cfg, tokenizer


def _tokenizer(vocab_size: int) -> Tokenizer | None:
    """A tokenizer of at most `vocab_size` tokens, or None where GLM's special tokens do not fit into so few."""
    try:
        return train_bpe(TOKENIZER_TEXT.splitlines(), vocab_size)
    except ConfigError as error:
        logger.warning("no tokenizer is written: %s", error)
        return None


def _tensors(specs: list[TensorSpec], stored: torch.dtype, seed: int, *, fp8: bool) -> Iterator[Tensor]:
    """The tensors that `tensor_layouts` names, in its order."""
    random_tensors = RandomTensors(seed)
    for spec in specs:
        if fp8 and spec.fp8:
            yield from random_tensors.blocks(spec)
        else:
            yield random_tensors.values(spec, torch.float32 if spec.dtype == "f32" else stored)


class RandomTensors:
    """Values of all tensors of a seed. Rows of a large tensor overlap in memory; no two rows or columns are equal."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def blocks(self, spec: TensorSpec) -> tuple[Tensor, Tensor]:
        """A weight in e4m3 and its block scales; outputs have unit variance for inputs of unit variance."""
        generator, count = self._generator(spec.name), math.prod(spec.shape)
        codes = self._windows(self._codes, spec, generator) if count > _TILE else _random_codes(count, generator)
        scale = torch.empty(tuple(map(num_blocks, spec.shape))).uniform_(0.5, 1.5, generator=generator)
        return codes.view(spec.shape), scale.div_(E4M3_RMS * spec.shape[-1] ** 0.5)

    def values(self, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
        """A tensor that is not quantized, in `dtype`."""
        if spec.name.endswith("norm.weight"):
            return torch.ones(spec.shape, dtype=dtype)
        if spec.name.endswith("norm.bias"):
            return torch.zeros(spec.shape, dtype=dtype)
        std = BIAS_STD if len(spec.shape) == 1 else 1.0 if spec.part == "embedding" else spec.shape[-1] ** -0.5
        generator = self._generator(spec.name)
        if math.prod(spec.shape) > _TILE:
            return self._windows((self._normals * std).to(dtype), spec, generator)
        return torch.empty(spec.shape).normal_(0.0, std, generator=generator).to(dtype)

    def _windows(self, tile: Tensor, spec: TensorSpec, generator: torch.Generator) -> Tensor:
        """A view of `tile` whose rows begin a fixed step apart, from an offset of this tensor. A view, because
        touching new memory takes longer than filling it."""
        num_rows, width = spec.shape
        first = int(torch.randint(len(tile) // 2, (), generator=generator))
        step = (len(tile) - first - width) // num_rows
        assert step > 0, f"{spec=}"
        return tile.as_strided(spec.shape, (step, 1), first)

    @cached_property
    def _codes(self) -> Tensor:
        return _random_codes(_TILE, self._generator("codes"))

    @cached_property
    def _normals(self) -> Tensor:
        return torch.empty(_TILE).normal_(generator=self._generator("normals"))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed_of(self._seed, name))


def seed_of(seed: int, name: str) -> int:
    """The seed of the tensor `name`, a signed 64-bit integer."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _random_codes(count: int, generator: torch.Generator) -> Tensor:
    codes = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return codes.masked_fill_((codes & 0x7F) == 0x7F, 0).view(FP8)  # without e4m3's two NaNs
