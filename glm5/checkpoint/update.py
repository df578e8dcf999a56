"""Other weights for a model that is in use, from a checkpoint directory: all checked before the first is replaced.

    tensors found -> do they fit the model? -> read into copies on the host -> finite? | copies -> parameters, in place

A directory may hold some of the tensors, down to single experts; what it lacks stays as it is. The model's formats
stay too: dense weights are cast or dequantized, FP8 weights take FP8 weights only, codes take codes of their scheme.
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
from glm5.parallel.table import WHOLE, Shard

# Say nothing of what a forward pass computes, or differ between exports of one model.
_FREE_KEYS = {
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
    """New content of parameters, on the host. `is_complete`: of every parameter."""

    parameters: dict[str, Tensor]
    is_complete: bool


def stage(model: Glm5, directory: Path, shard: Shard = WHOLE) -> Staged:
    """Read and check the weights in `directory`, beside the model. Takes as much host memory as they do. `shard`: as
    the model was loaded.

    Raises `CheckpointError` (`ConfigError` for a bad config.json) when anything is damaged, does not fit the model or
    is not a finite number, and when files were written to meanwhile: half of them might be of another step.
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
    """Copy what was staged into the model's parameters, which keep their places in memory."""
    current = model.state_dict()
    for name, tensor in staged.parameters.items():
        current[name].copy_(tensor)


def read_all(model: Glm5, directory: Path, shard: Shard = WHOLE) -> None:
    """Read the whole checkpoint that the model was loaded from into its parameters again; errors as from `load`."""
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
    """Tells the weights of a directory from any others, by names, sizes and times of its files: 16 bytes."""
    digest = blake2b(digest_size=16, person=b"glm5 weights")
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")]):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.digest()


def _check(found: Fit, names: list[str], kept: frozenset[str], directory: Path) -> None:
    """CheckpointError for what does not fit; tensors that are missing are no mistake here."""
    found.missing.clear()
    for name in sorted(kept - found.scaled):
        found.unreadable.append(f"{name}: is FP8 in the model in use; give it as F8_E4M3 with {name}{SCALE_SUFFIX}")
    if not found.loads:
        raise CheckpointError(f"{directory} does not fit the model in use: {'; '.join(found.problems())}")
    if not names:
        raise CheckpointError(f"{directory} holds no tensor of the model in use")


def _check_config(cfg: ModelConfig, directory: Path) -> None:
    """The same sizes may mean another model: what a config.json beside the weights says must be the same."""
    if not (directory / "config.json").is_file():
        return
    theirs, ours = ModelConfig.from_file(directory).model_dump(), cfg.model_dump()
    other = [f"{key} {theirs[key]} (in use: {ours[key]})" for key in ours if theirs[key] != ours[key]]
    other = [text for text in other if text.partition(" ")[0] not in _FREE_KEYS]
    if other:
        raise CheckpointError(f"{directory}/config.json is of another model: {', '.join(other)}")


def _copies(current: dict[str, Tensor], cfg: ModelConfig, names: list[str], kept: frozenset[str]) -> dict[str, Tensor]:
    """Host tensors for the parameters that `names` touch, with the present content where that is not all of them."""
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
