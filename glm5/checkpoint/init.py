"""A random checkpoint of any size, written tensor by tensor: nothing larger than one tensor is ever in memory.

Every matrix is normal(0, 1/sqrt(inputs)), which keeps activations and router logits near 1 at any width; embeddings
are normal(0, 1), norms 1, and selection biases small but not zero, so that a mistake with them shows. FP8 weights are
any e4m3 number alike. Each tensor's numbers follow from its name and the seed alone, whatever else is written. Those
of more than a few million are parts of as many that all of them share, so that writing takes no longer than the disk. A
byte-level tokenizer learnt from a few sentences comes along, so that the checkpoint can be served; the config's
end-of-text ids become that tokenizer's.
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
from glm5.checkpoint.names import SCALE_SUFFIX
from glm5.checkpoint.save import MAX_SHARD_BYTES, config_dict, write_checkpoint
from glm5.checkpoint.shard import CODES
from glm5.checkpoint.writer import TensorLayout
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.tensors import TensorSpec, tensor_specs
from glm5.kernels.block_scaled import FP8, num_blocks

logger = logging.getLogger(__name__)

E4M3_RMS = 130.0  # of e4m3's finite values, each as likely
_TILE = 1 << 22
BIAS_STD = 0.02  # of e_score_correction_bias, beside sigmoid scores that spread by about 0.2
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
    """Write a random checkpoint of `cfg` at `out` and return the directory; errors as those of `save`. `fp8`: weights
    have block scales where a published FP8 checkpoint has them, the others are of `dtype`."""
    stored = parse_dtype(dtype)
    cfg, tokenizer = _spelt(cfg)
    specs = tensor_specs(cfg)
    layout = [entry for spec in specs for entry in _entries(spec, stored, fp8=fp8)]
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
    """The same without weights, for an engine that makes its own (load_format dummy)."""
    cfg, tokenizer = _spelt(cfg)
    config = config_dict(cfg, parse_dtype(dtype), fp8=fp8)
    return write_checkpoint(Path(out), config, [], [], add_assets=tokenizer.save if tokenizer else None)


def _spelt(cfg: ModelConfig) -> tuple[ModelConfig, Tokenizer | None]:
    """A tokenizer for `cfg`, and the config with its token ids."""
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


def _entries(spec: TensorSpec, stored: torch.dtype, *, fp8: bool) -> Iterator[TensorLayout]:
    """A tensor on disk, and its scales."""
    if not (fp8 and spec.fp8):
        yield TensorLayout(spec.name, CODES[torch.float32 if spec.dtype == "f32" else stored], spec.shape)
        return
    yield TensorLayout(spec.name, CODES[FP8], spec.shape)
    yield TensorLayout(spec.name + SCALE_SUFFIX, CODES[torch.float32], tuple(map(num_blocks, spec.shape)))


def _tensors(specs: list[TensorSpec], stored: torch.dtype, seed: int, *, fp8: bool) -> Iterator[Tensor]:
    """As `_entries` has them."""
    numbers = Numbers(seed)
    for spec in specs:
        if fp8 and spec.fp8:
            yield from numbers.blocks(spec)
        else:
            yield numbers.values(spec, torch.float32 if spec.dtype == "f32" else stored)


class Numbers:
    """Of every tensor of a seed. Rows of a large one overlap in memory, and no two rows or columns of it are alike."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def blocks(self, spec: TensorSpec) -> tuple[Tensor, Tensor]:
        """Weight in e4m3 and its scales; the product has unit scale where its inputs have."""
        generator, count = self._generator(spec.name), math.prod(spec.shape)
        codes = self._windows(self._codes, spec, generator) if count > _TILE else _random_codes(count, generator)
        scale = torch.empty(tuple(map(num_blocks, spec.shape))).uniform_(0.5, 1.5, generator=generator)
        return codes.view(spec.shape), scale.div_(E4M3_RMS * spec.shape[-1] ** 0.5)

    def values(self, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
        """A tensor that is not quantized."""
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
        """Rows that begin some numbers of the tile apart, from a place of the tensor's own. No memory of its own: what
        nobody had before costs more than what is written into it."""
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
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _random_codes(count: int, generator: torch.Generator) -> Tensor:
    codes = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return codes.masked_fill_((codes & 0x7F) == 0x7F, 0).view(FP8)  # the two that are no numbers
