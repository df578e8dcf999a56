"""A random checkpoint of any size, written tensor by tensor: nothing larger than one tensor is ever in memory.

Every matrix is normal(0, 1/sqrt(inputs)), which keeps activations and router logits near 1 at any width; embeddings
are normal(0, 1), norms 1, and selection biases small but not zero, so that a mistake with them shows. Each tensor's
numbers follow from its name and the seed alone, whatever else is written. A byte-level tokenizer learnt from a few
sentences comes along, so that the checkpoint can be served; the config's end-of-text ids become that tokenizer's.
"""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer, train_bpe
from glm5.checkpoint.dtypes import parse_dtype
from glm5.checkpoint.save import MAX_SHARD_BYTES, config_dict, write_checkpoint
from glm5.checkpoint.shard import CODES
from glm5.checkpoint.writer import TensorLayout
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.tensors import TensorSpec, tensor_specs

logger = logging.getLogger(__name__)

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
) -> Path:
    """Write a random checkpoint of `cfg` at `out` and return the directory; errors as those of `save`."""
    stored = parse_dtype(dtype)
    tokenizer = _tokenizer(cfg.vocab_size)
    if tokenizer is not None:
        cfg = cfg.replace(eos_token_id=list(tokenizer.eos_ids), pad_token_id=tokenizer.pad_id)
    specs = tensor_specs(cfg)
    dtypes = [torch.float32 if spec.dtype == "f32" else stored for spec in specs]
    layout = [TensorLayout(spec.name, CODES[each], spec.shape) for spec, each in zip(specs, dtypes, strict=True)]
    return write_checkpoint(
        Path(out),
        config_dict(cfg, stored, fp8=False),
        layout,
        _tensors(specs, dtypes, seed),
        add_assets=tokenizer.save if tokenizer else None,
        max_shard_bytes=max_shard_bytes,
    )


def _tokenizer(vocab_size: int) -> Tokenizer | None:
    """A tokenizer of at most `vocab_size` tokens, or None where GLM's special tokens do not fit into so few."""
    try:
        return train_bpe(TOKENIZER_TEXT.splitlines(), vocab_size)
    except ConfigError as error:
        logger.warning("no tokenizer is written: %s", error)
        return None


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
