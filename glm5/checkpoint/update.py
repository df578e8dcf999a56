"""Replaces the weights of a model in use by those of a checkpoint directory; all are checked before the first changes.

    tensors found -> compare with the model -> read into copies on the host -> finite? | copies -> parameters, in place

A directory may hold only some of the tensors, down to single experts; the others are not changed. The model keeps its
formats: dense weights are cast or dequantized, FP8 weights accept only FP8, quantized ones only codes of their scheme.
"""

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.fit import Fit, fit
from glm5.checkpoint.index import counted, scan
from glm5.checkpoint.load import read_weights
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.stored import MODEL_SCALE_SUFFIX
from glm5.common.errors import CheckpointError
from glm5.config.model import ModelConfig
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import FP8
from glm5.model.glm5 import Glm5
from glm5.parallel.table import UNSHARDED, Shard

# Do not affect the forward pass, or differ between exports of one model.
_IGNORED_KEYS = {
    "dtype",
    "quantization_config",
    "lora_norm_eps",
    "num_nextn_predict_layers",
    "max_position_embeddings",
    "initializer_range",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "sharing",
    "unused",
    "extra",
}


@dataclass(frozen=True)
class Staged:
    """New values of parameters, on the host. `is_complete`: whether every parameter is among them."""

    parameters: dict[str, Tensor]
    is_complete: bool


def stage(model: Glm5, directory: Path, shard: Shard = UNSHARDED) -> Staged:
    """Read and check the weights in `directory` without changing the model. Takes as much host memory as the weights.
    `shard`: the one that the model was loaded with.

    Raises `CheckpointError` (`ConfigError` for a bad config.json) when anything is damaged, does not fit the model or
    is not finite, and when files changed meanwhile: some of them might be of another training step.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    identity = identity_of(directory)
    current = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    index = scan(directory)
    found = fit(index, model.cfg)
    stored = found.stored
    names = [n for n in found.specs if (stored[n].parts["codes"].name if n in stored else n) in index.entries]
    kept = frozenset(n for n in names if n not in stored and current[slot_of(n).parameter].dtype == FP8)
    _check(found, names, kept, directory)
    _check_config(model.cfg, directory)
    new = _copies(current, model.cfg, [name for name in names if name not in stored], kept)
    for slot in (slot_of(name) for name in names if name in stored):
        of_codes = [slot.parameter + suffix for suffix in ("", SCALE_SUFFIX, MODEL_SCALE_SUFFIX)]
        new |= {name: current[name].to("cpu", copy=True) for name in of_codes if name in current and name not in new}
    read_weights(new, directory, index, names, scaled=found.scaled, kept=kept, stored=stored, shard=shard)
    if bad := [name for name, tensor in new.items() if not _is_finite(tensor)]:
        raise CheckpointError(
            f"{directory}: {counted(bad, 'parameter')} would hold NaN or infinity; nothing was replaced"
        )
    if identity_of(directory) != identity:
        raise CheckpointError(f"{directory} was written to while it was read; nothing was replaced")
    return Staged(new, len(new) == len(current))


@torch.no_grad()
def replace(model: Glm5, staged: Staged) -> None:
    """Copy the staged values into the model's parameters, in place."""
    current = model.state_dict()
    for name, tensor in staged.parameters.items():
        current[name].copy_(tensor)


def read_all(model: Glm5, directory: Path, shard: Shard = UNSHARDED) -> None:
    """Read the complete checkpoint that the model was loaded from into its parameters again. Raises as `load` does."""
    current = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    index = scan(directory)
    found = fit(index, model.cfg)
    found.check()
    stored = found.stored
    kept = frozenset(n for n in found.specs if n not in stored and current[slot_of(n).parameter].dtype == FP8)
    read_weights(
        current,
        directory,
        index,
        found.specs,
        scaled=found.scaled,
        kept=kept,
        stored=stored,
        shard=shard,
        may_map=True,
    )


def identity_of(directory: Path) -> bytes:
    """A 16-byte digest of names, sizes and modification times of a directory's files."""
    digest = blake2b(digest_size=16, person=b"glm5 weights")
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")]):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.digest()


def _check(found: Fit, names: list[str], kept: frozenset[str], directory: Path) -> None:
    """CheckpointError for tensors that do not fit the model; absent tensors are allowed."""
    found.missing.clear()
    for name in sorted(kept - found.scaled):
        found.unreadable.append(f"{name}: is FP8 in the model in use; give it as F8_E4M3 with {name}{SCALE_SUFFIX}")
    if not found.loads:
        raise CheckpointError(f"{directory} does not fit the model in use: {'; '.join(found.problems())}")
    if not names:
        raise CheckpointError(f"{directory} holds no tensor of the model in use")


def _check_config(cfg: ModelConfig, directory: Path) -> None:
    """CheckpointError for another model of the same sizes: a config.json beside the weights must agree."""
    if not (directory / "config.json").is_file():
        return
    given, current = ModelConfig.from_file(directory).model_dump(), cfg.model_dump()
    differences = [f"{key} {given[key]} (in use: {current[key]})" for key in current if given[key] != current[key]]
    differences = [text for text in differences if text.partition(" ")[0] not in _IGNORED_KEYS]
    if differences:
        raise CheckpointError(f"{directory}/config.json is of another model: {', '.join(differences)}")


def _copies(current: dict[str, Tensor], cfg: ModelConfig, names: list[str], kept: frozenset[str]) -> dict[str, Tensor]:
    """Host tensors for the parameters that `names` belong to, with the current values if `names` cover only a part."""
    num_parts = Counter(slot_of(spec.name).parameter for spec in tensor_specs(cfg))
    num_given = Counter(slot_of(name).parameter for name in names)
    num_parts += Counter(slot_of(spec.name + SCALE_SUFFIX).parameter for spec in tensor_specs(cfg))
    num_given += Counter(slot_of(name + SCALE_SUFFIX).parameter for name in kept)
    new: dict[str, Tensor] = {}
    for parameter, count in num_given.items():
        new[parameter] = torch.empty(current[parameter].shape, dtype=current[parameter].dtype)
        if count < num_parts[parameter]:
            new[parameter].copy_(current[parameter])
    return new


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == FP8:  # e4m3fn has no infinity, and two NaNs
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    return bool(tensor.isfinite().all())
