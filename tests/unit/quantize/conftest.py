"""A small checkpoint whose rows divide into groups of 128, never to be written to."""

from pathlib import Path

import pytest

from glm5.checkpoint.save import save
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from tests.support.models import random_model

SIZES = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "q_lora_rank": 128,
    "num_hidden_layers": 3,
    "index_topk_pattern": "FFS",
}


def small() -> ModelConfig:
    return preset("tiny").replace(**SIZES)


@pytest.fixture(scope="session")
def small_bf16(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / "bf16"
    save(random_model(3, small()), path, dtype="bfloat16", max_shard_bytes=500_000)
    return path
