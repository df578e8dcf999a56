"""Compares the tensors of a checkpoint with those that the architecture of its config needs, by name.

A weight is native FP8 if and only if `<name>_scale_inv` exists anywhere in the checkpoint. The config's list of modules
not to convert is not used, because published lists name a tensor wrongly (model spec, section 1.2). The formats of
other quantized weights follow from the config (stored.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from glm5.checkpoint.formats import stored_of
from glm5.checkpoint.formats.base import Stored
from glm5.checkpoint.index import ShardIndex, counted
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.shard import TensorEntry
from glm5.common.errors import CheckpointError
from glm5.config.model import ModelConfig
from glm5.config.tensors import TensorSpec, tensor_specs
from glm5.kernels.block_scaled import BLOCK

# Of the MTP layer, where quantization has rotated the residual stream (model/mtp.py).
ROTATIONS = ("hidden_rotation.weight", "chained_rotation.weight")
FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class Fit:
    """The result of `fit`: what would be loaded, and every reason why the checkpoint does not load."""

    source: str
    cfg: ModelConfig
    """The config, without the MTP layer if the checkpoint has none of its tensors."""
    specs: dict[str, TensorSpec]
    """The tensors that the model needs, by their name on disk."""
    missing: list[str] = field(default_factory=list)
    """Needed but absent: `name [shape]`."""
    unexpected: list[str] = field(default_factory=list)
    """Present but unknown: `name [shape]`."""
    misshaped: list[str] = field(default_factory=list)
    """`name: got [shape], expected [shape]`."""
    unreadable: list[str] = field(default_factory=list)
    """With a dtype that cannot be loaded, or with only one tensor of an FP8 pair: `name: reason`."""
    ignored: list[str] = field(default_factory=list)
    """Present but known to be unused by this model, and skipped: `name: reason`."""
    damage: tuple[str, ...] = ()
    """Files that are absent, truncated or corrupt; one sentence each."""
    scaled: frozenset[str] = frozenset()
    """Names of the FP8 weights, which have block scales."""
    kept: frozenset[str] = frozenset()
    """The subset of `scaled` that a model can hold as FP8, as published: all weights of the module are FP8."""
    stored: dict[str, Stored] = field(default_factory=dict)
    """Weights in another quantized format, as config.json says, by their name when not quantized."""
    masters: dict[str, Stored] = field(default_factory=dict)
    """Weights that config.json says are in such a format, and that are given as floats."""

    @property
    def is_rotated(self) -> bool:
        """Whether the MTP layer has rotations."""
        return any(name.endswith(ROTATIONS) for name in self.specs)

    @property
    def loads(self) -> bool:
        return not (self.damage or self.missing or self.unexpected or self.misshaped or self.unreadable)

    def problems(self) -> list[str]:
        """One sentence for each kind of problem, with the first few names; empty if the checkpoint loads."""
        kinds = {
            "missing tensor": self.missing,
            "unexpected tensor": self.unexpected,
            "mis-shaped tensor": self.misshaped,
            "unreadable tensor": self.unreadable,
        }
        return [*self.damage, *(counted(names, kind) for kind, names in kinds.items() if names)]

    def check(self) -> None:
        """Raise `CheckpointError` with all problems unless the checkpoint loads."""
        if self.damage:  # the tensors of a damaged file would only be listed again as missing
            raise CheckpointError("; ".join(self.damage))
        if not self.loads:
            raise CheckpointError(
                f"{self.source} does not fit its config.json: {'; '.join(self.problems())}; "
                f"glm5 inspect {self.source} lists them all"
            )


def fit(index: ShardIndex, cfg: ModelConfig, *, takes_masters: bool = False) -> Fit:
    """Compare `index` with the tensors that `cfg` asks for. `takes_masters`: floats may stand for quantized weights."""
    entries = index.entries
    mtp = f"model.layers.{cfg.num_hidden_layers}."
    if cfg.num_nextn_predict_layers and entries and not any(name.startswith(mtp) for name in entries):
        cfg = cfg.replace(num_nextn_predict_layers=0)  # transformers drops the MTP layer when it saves
    specs = {spec.name: spec for spec in tensor_specs(cfg)}
    if cfg.num_nextn_predict_layers and any(mtp + name in entries for name in ROTATIONS):
        square = (cfg.hidden_size, cfg.hidden_size)
        specs |= {mtp + name: TensorSpec(mtp + name, square, "f32", "mtp", fp8=False) for name in ROTATIONS}
    told = {name: entry for name, entry in entries.items() if not (takes_masters and entry.dtype in FLOATS)}
    stored, masters = stored_of(cfg, told), dict[str, Stored]()
    for name in [name for name in stored if takes_masters and _is_master(entries.get(name), specs[name])]:
        masters[name] = stored.pop(name)
    scaled = frozenset(n for n in specs if n in entries and n + SCALE_SUFFIX in entries and n not in stored)
    kept = _kept(specs, scaled)
    result = Fit(
        index.source, cfg, specs, damage=index.problems, scaled=scaled, kept=kept, stored=stored, masters=masters
    )
    for name, spec in specs.items():
        if name in stored:
            _check_stored(result, stored[name], entries)
        elif name in entries:
            _check_weight(result, spec, entries)
        else:
            result.missing.append(f"{name} {list(spec.shape)}")
    known = {name for matrix in stored.values() for name in matrix.tensor_names}
    for name, entry in entries.items():
        if name not in specs and name not in known and name.removesuffix(SCALE_SUFFIX) not in scaled:
            _check_leftover(result, entry, entries)
    return result


def _is_master(entry: TensorEntry | None, spec: TensorSpec) -> bool:
    return entry is not None and entry.dtype in FLOATS and entry.shape == spec.shape


def _kept(specs: Mapping[str, TensorSpec], scaled: frozenset[str]) -> frozenset[str]:
    """FP8 weights of modules that are entirely FP8; modules with mixed weights are dequantized."""
    dense = {slot_of(name).module for name in specs if name not in scaled}
    return frozenset(name for name in scaled if specs[name].fp8 and slot_of(name).module not in dense)


def _check_weight(result: Fit, spec: TensorSpec, entries: Mapping[str, TensorEntry]) -> None:
    entry, scale = entries[spec.name], entries.get(spec.name + SCALE_SUFFIX)
    if entry.shape != spec.shape:
        result.misshaped.append(_misshaped(entry, spec.shape))
    if scale is None:
        if entry.dtype.startswith("F8"):
            result.unreadable.append(f"{spec.name}: {entry.dtype} without {spec.name}{SCALE_SUFFIX}")
        elif entry.dtype not in FLOATS:
            result.unreadable.append(
                f"{spec.name}: stored as {entry.dtype}, allowed: {', '.join(FLOATS)} or scaled F8_E4M3"
            )
        return
    if len(spec.shape) != 2:
        result.unreadable.append(f"{spec.name}: has scales, but is no matrix")
        return
    if entry.dtype != "F8_E4M3":
        result.unreadable.append(f"{spec.name}: stored as {entry.dtype} although it has scales, allowed: F8_E4M3")
    if scale.dtype != "F32":
        result.unreadable.append(f"{scale.name}: stored as {scale.dtype}, allowed: F32")
    grid = tuple(-(-size // BLOCK) for size in spec.shape)
    if scale.shape != grid:
        result.misshaped.append(_misshaped(scale, grid))


def _check_stored(result: Fit, matrix: Stored, entries: Mapping[str, TensorEntry]) -> None:
    for part in matrix.parts.values():
        entry = entries.get(part.name)
        if entry is None:
            result.missing.append(f"{part.name} {list(part.shape)}")
        elif entry.dtype not in part.dtypes:
            result.unreadable.append(f"{part.name}: stored as {entry.dtype}, allowed: {', '.join(part.dtypes)}")
        elif entry.shape != part.shape:
            result.misshaped.append(_misshaped(entry, part.shape))


def _check_leftover(result: Fit, entry: TensorEntry, entries: Mapping[str, TensorEntry]) -> None:
    name = entry.name.removesuffix(SCALE_SUFFIX)
    if reason := _ignored_reason(name, result.cfg):
        result.ignored.append(f"{entry.name}: {reason}")
    elif name in result.specs and name not in entries:
        result.unreadable.append(f"{entry.name}: scales without {name}")
    else:
        result.unexpected.append(f"{entry.name} {list(entry.shape)}")


_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def _ignored_reason(name: str, cfg: ModelConfig) -> str | None:
    """Why a tensor that the model lacks may be ignored; None if it is an error."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    layer_idx, rest = int(found[1]), found[2]
    if layer_idx == cfg.num_hidden_layers:
        if not cfg.num_nextn_predict_layers:
            return "part of an MTP layer, and num_nextn_predict_layers is 0"
        if rest in ("embed_tokens.weight", "shared_head.head.weight"):
            return "the MTP layer reads the main model's"
    if rest == "self_attn.rotary_emb.inv_freq":
        return "computed from rope_theta"
    if rest.startswith("self_attn.indexer.") and layer_idx < cfg.num_hidden_layers and not cfg.has_indexer(layer_idx):
        return "this layer shares the selection of an earlier one"
    return None


def _misshaped(entry: TensorEntry, expected: tuple[int, ...]) -> str:
    return f"{entry.name}: got {list(entry.shape)}, expected {list(expected)}"
