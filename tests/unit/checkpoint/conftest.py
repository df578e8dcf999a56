"""Saved checkpoints to read, copy and damage."""

import shutil
from pathlib import Path

import pytest

from glm5.checkpoint.save import save
from tests.support.checkpoints import ragged, tiny
from tests.support.models import random_model

SMALL_SHARDS = 60_000  # bytes: about thirty shards of the tiny model


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> dict[str, Path]:
    """One bfloat16 and one FP8 checkpoint, sharded, never to be written to."""
    root = tmp_path_factory.mktemp("originals")
    save(random_model(1, tiny()), root / "bf16", dtype="bfloat16", max_shard_bytes=SMALL_SHARDS)
    save(random_model(2, ragged()), root / "fp8", dtype="fp8", max_shard_bytes=SMALL_SHARDS)
    return {"bf16": root / "bf16", "fp8": root / "fp8"}


@pytest.fixture
def bf16(originals, tmp_path) -> Path:
    """A bfloat16 checkpoint of the test's own."""
    return Path(shutil.copytree(originals["bf16"], tmp_path / "bf16"))


@pytest.fixture
def fp8(originals, tmp_path) -> Path:
    """An FP8 checkpoint with ragged blocks, of the test's own."""
    return Path(shutil.copytree(originals["fp8"], tmp_path / "fp8"))
