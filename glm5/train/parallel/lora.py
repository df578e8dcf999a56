"""Distributed LoRA: each rank has rows of the base, in the format of its checkpoint, and rows of the adapters.

The base is gathered in its stored format, FP8 and int4 included, without casts; adapters are float32. States and output
contain only the adapters, in the same format as with one process.
"""

import re
from pathlib import Path

import torch

from glm5.checkpoint.adapters import write_adapter
from glm5.checkpoint.load import load
from glm5.checkpoint.resolve import resolve
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.step import LoraConfig
from glm5.config.train import StageConfig
from glm5.model.glm5 import Glm5
from glm5.train.build import checked_changes
from glm5.train.lora import FrozenExperts, adapt
from glm5.train.parallel.build import ModelShard, build, fill
from glm5.train.parallel.gather import gather_tensors, scatter_tensors
from glm5.train.parallel.trainer import DistributedTrainer
from glm5.train.sharded_state import weight_rows
from glm5.train.stages import phase_of
from glm5.train.step import Phase

_ADAPTER = re.compile(r"(.+)\.lora_([AB])")


class DistributedLora(DistributedTrainer):
    """`LoraTrainer` for one rank of a distributed run."""

    @property
    def _lora(self) -> LoraConfig:
        assert self.recipe.lora is not None
        return self.recipe.lora

    @property
    def _base(self) -> str:
        assert self.recipe.model.checkpoint is not None
        return self.recipe.model.checkpoint

    def export(self, folder: Path, dtype: str | torch.dtype, assets: Path | None) -> None:
        """Write the adapter, without the base model."""
        names = [name for name in self._shard.layout.shapes if _ADAPTER.fullmatch(name)]
        found = dict(gather_tensors(self._shard, self.team, names))
        if self.is_first:
            modules = dict.fromkeys(match[1] for name in names if (match := _ADAPTER.fullmatch(name)))
            matrices = {name: (found[f"{name}.lora_A"], found[f"{name}.lora_B"]) for name in modules}
            write_adapter(folder, matrices, rank=self._lora.rank, alpha=self._lora.alpha, base=self._base)

    def _phase(self, stage: StageConfig) -> Phase:
        return Phase(phase_of(stage).keys)  # indexers are frozen, too

    def _build(self, stage: StageConfig, cfg: ModelConfig) -> ModelShard:
        model = self._adapted("meta")
        model.cfg, parallel = cfg, self.recipe.parallel
        if parallel.expert > 1 and any(isinstance(module, FrozenExperts) for module in model.modules()):
            raise ConfigError(
                f"parallel.expert: got {parallel.expert}; with LoRA, experts that are stored in FP8 or int4 are "
                "sharded by FSDP, not by expert; leave it out"
            )
        compute, depth = model.dtype, self._mtp_depth
        return build(model, self.team, parallel, dtype=torch.float32, compute=compute, mtp_depth=depth, has_base=True)

    def _fill(self, part: ModelShard) -> None:
        """Fill with the checkpoint's base, and new adapters or those of the resumed state."""
        if (old := self.part) is not None:
            fill(part, self.team.rank, lambda name, _: old.local[name].detach(), old.buffers.__getitem__)
            return
        scatter_tensors(part, self.team, self._adapted("cpu").state_dict() if self.is_first else None)
        if (parts := self.parts) is not None:
            for name, parameter in part.local.items():
                if parameter.requires_grad:
                    spans = part.layout.spans(name, self.team.rank)
                    parameter.data.copy_(weight_rows(parts, name, spans).view_as(parameter))

    def _adapted(self, device: str) -> Glm5:
        """The unsharded model of the checkpoint with new adapters."""
        model = load(
            resolve(self._base), dtype="auto", device=device, changes=checked_changes(self.builder.recipe.model)
        )
        adapt(model, self._lora, self.recipe.seed)
        return model
