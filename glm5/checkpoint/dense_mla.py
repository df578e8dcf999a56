"""Training from a dense-MLA checkpoint, which has no indexers: GLM-4.7-Flash's layout read as a GLM-5 model.

    config.json   model_type glm4_moe_lite: GLM-5's keys except index_*, which the recipe or the defaults below give
    tensors       GLM-5's names except self_attn.indexer.*, which are initialised at random, also in the MTP layer

With dense attention such a model computes what the checkpoint computed. Its indexers are trained in warm-up (training
notes, 3.7).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glm5.checkpoint.dtypes import parse_dtype
from glm5.checkpoint.fit import fit
from glm5.checkpoint.index import scan
from glm5.checkpoint.load import read_model
from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.resolve import ARCHITECTURE, MODEL_TYPE
from glm5.model.glm5 import Glm5
from glm5.model.init import init_parameters

MODEL_TYPES = ("glm4_moe_lite",)
INDEXER = ".self_attn.indexer."
INDEX_KEYS = {"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128}
"""Sizes of GLM-5's indexers."""


def has_no_indexers(checkpoint: Path) -> bool:
    """Whether a folder holds a dense-MLA checkpoint in a layout that this file reads."""
    try:
        return (
            json.loads(read_bounded_text(checkpoint / "config.json", SETTINGS, ConfigError)).get("model_type")
            in MODEL_TYPES
        )
    except (OSError, ValueError, RecursionError, AttributeError):
        return False  # ModelConfig.from_file reports what is wrong with the file


def config_to_train(checkpoint: Path, changes: Mapping[str, Any]) -> ModelConfig:
    """The config of a checkpoint. A dense one gets indexers; `changes` are keys of config.json, such as their sizes.

    Raises ConfigError for what GLM-5's architecture lacks.
    """
    if not has_no_indexers(checkpoint):
        return ModelConfig.from_file(checkpoint)
    raw = json.loads(read_bounded_text(checkpoint / "config.json", SETTINGS, ConfigError))
    identity = {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE]}
    try:
        return ModelConfig.from_dict({**INDEX_KEYS, **raw, **changes, **identity})
    except ConfigError as error:
        raise ConfigError(f"{checkpoint}/config.json: {error}") from None


def load_dense(checkpoint: Path, cfg: ModelConfig, dtype: str | torch.dtype, seed: int) -> Glm5:
    """The model of `cfg` (from `config_to_train`) with the checkpoint's weights and random indexers drawn from `seed`.

    Raises CheckpointError for files that are damaged or do not fit.
    """
    index = scan(checkpoint)
    found = fit(index, cfg)
    found = replace(
        found,
        specs={name: spec for name, spec in found.specs.items() if INDEXER not in name},
        missing=[name for name in found.missing if INDEXER not in name],
    )
    found.check()
    model = read_model(checkpoint, index, found, parse_dtype(dtype), torch.device("cpu"))
    init_parameters(indexers(model), model.cfg.initializer_range, seed)
    return model


def indexers(model: Glm5) -> list[tuple[str, nn.Parameter]]:
    """Parameters of the indexers, with their names."""
    return [(name, weight) for name, weight in model.named_parameters() if INDEXER in name]
