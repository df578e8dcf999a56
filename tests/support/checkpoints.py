"""Small checkpoints for tests: models with ragged FP8 blocks, and damage done on purpose."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.quant.qat import int4

# Nothing divides 128: kv_a has 132 + 8 rows, a head of kv_b 16 + 64 rows, an expert 136.
RAGGED_SIZES = {
    "hidden_size": 200,
    "intermediate_size": 300,
    "moe_intermediate_size": 136,
    "q_lora_rank": 136,
    "kv_lora_rank": 132,
    "num_attention_heads": 3,
    "v_head_dim": 64,
    "n_routed_experts": 4,
}


def tiny() -> ModelConfig:
    return preset("tiny")


def ragged() -> ModelConfig:
    return preset("tiny").replace(**RAGGED_SIZES)


def shard_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by the safetensors library, which our own reader is checked against."""
    return {name: tensor for file in shard_files(directory) for name, tensor in load_file(file).items()}


def write_tensors(directory: Path, tensors: dict[str, Tensor], shard_of: Callable[[str], int] | None = None) -> None:
    """Replace all weights of a checkpoint: one file, or shard number `shard_of(name)` with an index."""
    for file in shard_files(directory):
        file.unlink()
    index = directory / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    if shard_of is None:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    num_shards = 1 + max(map(shard_of, tensors))
    names = {name: f"model-{shard_of(name) + 1:05d}-of-{num_shards:05d}.safetensors" for name in tensors}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, directory / file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Apply `edit` to the dictionary of all tensors and write them back as one file."""
    tensors = read_tensors(directory)
    edit(tensors)
    write_tensors(directory, tensors)


def snap(tensors: dict[str, Tensor]) -> None:
    """Put experts on int4's grid, where training with it in view may leave them. For `edit_tensors`."""
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            tensor.copy_(int4(tensor).dequantize(tensor.dtype))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
