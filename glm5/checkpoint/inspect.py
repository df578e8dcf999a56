"""A report on a checkpoint and whether it would load, from its config and shard headers; no weight is read.

For a hub id only config.json, the index and the headers are fetched, a few megabytes even of the largest model.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm5.checkpoint.fit import Fit, fit
from glm5.checkpoint.index import ShardIndex, merge, scan
from glm5.checkpoint.names import SCALE_SUFFIX
from glm5.checkpoint.resolve import hub_errors, is_hub_id, resolve
from glm5.checkpoint.shard import TensorEntry
from glm5.config.model import ModelConfig
from glm5.config.tensors import ParameterCount, count_parameters
from glm5.quant.qat import KEY

_PROBLEMS = ("damage", "missing", "unexpected", "misshaped", "unreadable", "ignored")  # fields of Fit


@dataclass(frozen=True)
class CheckpointReport:
    """The result of `inspect`. Byte counts are of the tensors found; scales count with the part of their weights."""

    source: str
    cfg: ModelConfig
    """As config.json states it."""
    parameters: ParameterCount
    """Parameter counts that follow from `cfg`."""
    num_tensors: int
    num_files: int
    bytes_by_dtype: dict[str, int]
    bytes_by_part: dict[str, int]
    """By `TensorSpec.part`; "ignored" and "unexpected" for the tensors that the model does not have."""
    fit: Fit

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_by_dtype.values())

    @property
    def quantization_aware(self) -> object:
        """The record of quantization-aware training in config.json, or None."""
        return self.cfg.extra.get(KEY)

    @property
    def unknown_config_keys(self) -> list[str]:
        """Keys of config.json that are not used."""
        return sorted(self.cfg.extra.keys() - {KEY})

    @property
    def loads(self) -> bool:
        """Whether `load` would accept it."""
        return self.fit.loads

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, all names in full."""
        found = self.fit
        return {
            "source": self.source,
            "loads": self.loads,
            "has_mtp": bool(found.cfg.num_nextn_predict_layers),
            "parameters": asdict(self.parameters),
            "num_tensors": self.num_tensors,
            "num_files": self.num_files,
            "num_bytes": self.num_bytes,
            "bytes_by_dtype": self.bytes_by_dtype,
            "bytes_by_part": self.bytes_by_part,
            "num_fp8_weights": len(found.scaled),
            **{kind: list(getattr(found, kind)) for kind in _PROBLEMS},
            "unknown_config_keys": self.unknown_config_keys,
            KEY: self.quantization_aware,
            "config": self.cfg.to_dict(),
        }


def inspect(path_or_id: str | Path) -> CheckpointReport:
    """Report on a checkpoint directory or hub id.

    Damage and mismatches are in the report. Raises only `ConfigError` for a config.json that cannot be read and
    `CheckpointError` for a directory or repository that does not exist.
    """
    if is_hub_id(path_or_id):
        cfg, index = _scan_hub(str(path_or_id))
    else:
        directory = resolve(path_or_id)
        cfg, index = ModelConfig.from_file(directory), scan(directory)
    found = fit(index, cfg)
    by_dtype, by_part = Counter[str](), Counter[str]()
    owners = {name: stored.name for stored in found.stored.values() for name in stored.tensor_names}
    ignored = {line.partition(":")[0] for line in found.ignored}
    for name, entry in index.entries.items():
        spec = found.specs.get(owners.get(name, name)) or found.specs.get(name.removesuffix(SCALE_SUFFIX))
        by_dtype[entry.dtype] += entry.num_bytes
        by_part[spec.part if spec else "ignored" if name in ignored else "unexpected"] += entry.num_bytes
    return CheckpointReport(
        source=index.source,
        cfg=cfg,
        parameters=count_parameters(cfg),
        num_tensors=len(index.entries),
        num_files=len(index.files),
        bytes_by_dtype=dict(by_dtype.most_common()),
        bytes_by_part=dict(by_part.most_common()),
        fit=found,
    )


def _scan_hub(repo_id: str) -> tuple[ModelConfig, ShardIndex]:
    import huggingface_hub

    with hub_errors(repo_id):
        config_path = huggingface_hub.hf_hub_download(repo_id, "config.json")
        metadata = huggingface_hub.get_safetensors_metadata(repo_id)
    by_file = {
        file: [
            TensorEntry(name, str(info.dtype), tuple(info.shape), file, *info.data_offsets)
            for name, info in header.tensors.items()
        ]
        for file, header in metadata.files_metadata.items()
    }
    index = merge(repo_id, sorted(by_file), by_file, metadata.weight_map, [])
    return ModelConfig.from_file(config_path), index
