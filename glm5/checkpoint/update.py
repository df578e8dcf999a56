"""Replaces the weights of a model in use by those of a checkpoint directory; all are checked before the first changes.

    tensors found -> compare with the model -> read into copies on the host -> finite? | copies -> parameters, in place

A directory may hold only some of the tensors, down to single experts; the others are not changed. The model keeps its
formats: dense weights are cast or dequantized, FP8 and other quantized weights accept codes of their scheme, or floats,
which are quantized (masters.py). Values in memory come in buckets instead (push.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.changes import Change
from glm5.checkpoint.fit import ROTATIONS, Fit, fit
from glm5.checkpoint.formats import format_of
from glm5.checkpoint.index import ShardIndex, counted, scan
from glm5.checkpoint.load import read_weights
from glm5.checkpoint.masters import Master
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.stored import MODEL_SCALE_SUFFIX
from glm5.common.errors import CheckpointError
from glm5.config.model import ModelConfig
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import FP8
from glm5.model.glm5 import Glm5
from glm5.parallel.table import UNSHARDED, Shard
from glm5.quant.qat import KEY

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
    """New values of parameters, on the host. `is_complete`: whether every tensor of the model is among them.
    `changes`: new elements of tensors, by their names on disk. `id`: of a version of a folder (versions.py)."""

    parameters: dict[str, Tensor]
    is_complete: bool
    changes: Mapping[str, Change] = field(default_factory=dict[str, Change])
    id: str | None = None

    @property
    def num_bytes(self) -> int:
        of_changes = (one for change in self.changes.values() for one in (change.gaps, change.values))
        return sum(one.nbytes for one in (*self.parameters.values(), *of_changes) if one is not None)


@dataclass(frozen=True)
class Match:
    """Tensors that are those of a model in use: what `fit` found, and the arguments of `read_weights`. `is_complete`:
    none of the model's is absent."""

    found: Fit
    names: list[str]
    kept: frozenset[str]
    masters: dict[str, Master]
    is_complete: bool

    def read_into(
        self,
        parameters: dict[str, Tensor],
        source: Path | Tensor,
        index: ShardIndex,
        shard: Shard,
        *,
        quiet: bool = False,
    ) -> list[str]:
        """Read those tensors that are in `index` from a directory or from memory; their names. `quiet`: show no
        progress."""
        names = [name for name in self.names if self._on_disk(name) in index.entries]
        read_weights(
            parameters,
            source,
            index,
            names,
            scaled=self.found.scaled,
            kept=self.kept,
            stored=self.found.stored,
            masters=self.masters,
            shard=shard,
            quiet=quiet,
        )
        return names

    def _on_disk(self, name: str) -> str:
        return self.found.stored[name].parts["codes"].name if name in self.found.stored else name


def stage(
    model: Glm5, directory: Path, shard: Shard = UNSHARDED, index: ShardIndex | None = None, id: str | None = None
) -> Staged:
    """Read and check the weights in `directory` without changing the model. Takes as much host memory as the weights.
    `shard`: the one that the model was loaded with. `index`: of its files, by default those of a checkpoint.

    Raises `CheckpointError` (`ConfigError` for a bad config.json) when anything is damaged, does not fit the model or
    is not finite, and when files changed meanwhile: some of them might be of another training step.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    identity = identity_of(directory)
    current = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    index = index or scan(directory)
    given = match(model, index)
    _check_config(model.cfg, directory)
    coded = given.found.stored.keys() | given.masters.keys()
    new = _copies(current, model.cfg, [name for name in given.names if name not in coded], given.kept)
    for parameter in (slot_of(name).parameter for name in given.names if name in coded):
        new |= {name: current[name].to("cpu", copy=True) for name in parts_of(parameter, current) if name not in new}
    given.read_into(new, directory, index, shard)
    if bad := [name for name, tensor in new.items() if not is_finite(tensor)]:
        raise CheckpointError(
            f"{directory}: {counted(bad, 'parameter')} would hold NaN or infinity; nothing was replaced"
        )
    if identity_of(directory) != identity:
        raise CheckpointError(f"{directory} was written to while it was read; nothing was replaced")
    return Staged(new, given.is_complete, id=id)


def match(model: Glm5, index: ShardIndex) -> Match:
    """The tensors of `index` as weights of a model in use; absent ones are allowed. Raises CheckpointError when there
    are none, or when any does not fit."""
    current = model.state_dict()
    found = fit(index, model.cfg, takes_masters=True)
    stored, entries = found.stored, index.entries
    names = [n for n in found.specs if (stored[n].parts["codes"].name if n in stored else n) in entries]
    kept: set[str] = set()
    masters: dict[str, Master] = {}
    for name in names:
        parameter = slot_of(name).parameter
        held = current[parameter]
        if name in stored or (held.is_floating_point() and held.dtype != FP8):
            continue
        if held.dtype == FP8 and parameter + SCALE_SUFFIX in current:
            if name in found.scaled:
                kept.add(name)
            else:
                masters[name] = Master()
        elif name in found.masters:
            masters[name] = Master(found.masters[name], format_of(model.cfg), KEY in model.cfg.extra)
        else:
            found.unreadable.append(f"{name}: the model in use holds it as {held.dtype}, in a format without floats")
    if masters and any(name.endswith(ROTATIONS) for name in current):
        found.unreadable.append(f"{min(masters)}: was rotated before the model in use was quantized; give its codes")
    is_complete = not found.missing and found.cfg.num_nextn_predict_layers == model.cfg.num_nextn_predict_layers
    found.missing.clear()
    if not found.loads:
        raise CheckpointError(f"{index.source} does not fit the model in use: {'; '.join(found.problems())}")
    if not names:
        raise CheckpointError(f"{index.source} holds no tensor of the model in use")
    return Match(found, names, frozenset(kept), masters, is_complete)


def parts_of(parameter: str, current: Mapping[str, Tensor]) -> list[str]:
    """A parameter and its scales, as far as the model has them."""
    return [parameter + suffix for suffix in ("", SCALE_SUFFIX, MODEL_SCALE_SUFFIX) if parameter + suffix in current]


@torch.no_grad()
def replace(model: Glm5, staged: Staged) -> None:
    """Copy the staged values into the model's parameters, in place."""
    current = model.state_dict()
    for name, tensor in staged.parameters.items():
        current[name].copy_(tensor)
    for name, change in staged.changes.items():
        slot = slot_of(name)
        change.write_into(slot.view(current[slot.parameter]))


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


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether none holds NaN or infinity, with one wait for their device. False also where a sum overflows."""
    sums = [tensor.sum().float() for tensor in tensors if tensor.element_size() > 1]
    others = [tensor for tensor in tensors if tensor.element_size() == 1]
    return (not sums or bool(torch.stack(sums).isfinite().all())) and all(map(is_finite, others))


def is_finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor infinity."""
    if tensor.dtype == FP8:  # e4m3fn has no infinity, and two NaNs
        return not tensor.numel() or bool((tensor.view(torch.uint8) & 0x7F).max() < 0x7F)
    # The sum is NaN or infinite if any element is. On a CPU it takes a thirtieth of the time; it may overflow.
    if tensor.element_size() > 1 and bool(tensor.sum().isfinite()):
        return True
    return bool(tensor.isfinite().all())
