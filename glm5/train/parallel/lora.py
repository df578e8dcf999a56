"""LoRA over several processes: each has rows of the base, as its checkpoint stores it, and rows of the adapters.

The base travels as it is stored, FP8 and int4 as such, and is cast by nobody; adapters are float32. Only adapters are
in states and in what is written, which is the same as of one process.
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
from glm5.train.lora import FrozenExperts, adapt
from glm5.train.parallel.build import ModelShard, build, fill
from glm5.train.parallel.gather import spread, whole_tensors
from glm5.train.parallel.trainer import SharedTrainer
from glm5.train.sharded_state import weight_rows
from glm5.train.stages import phase_of
from glm5.train.step import Phase

_ADAPTER = re.compile(r"(.+)\.lora_([AB])")


class SharedLora(SharedTrainer):
    """`LoraTrainer` of one rank of a team."""

    @property
    def _lora(self) -> LoraConfig:
        assert self.recipe.lora is not None
        return self.recipe.lora

    @property
    def _base(self) -> str:
        assert self.recipe.model.checkpoint is not None
        return self.recipe.model.checkpoint

    def export(self, folder: Path, dtype: str | torch.dtype, assets: Path | None) -> None:
        """Write the adapter; the base checkpoint has all else."""
        names = [name for name in self._have.places.shapes if _ADAPTER.fullmatch(name)]
        found = dict(whole_tensors(self._have, self.team, names))
        if self.is_first:
            modules = dict.fromkeys(found_in[1] for name in names if (found_in := _ADAPTER.fullmatch(name)))
            matrices = {name: (found[f"{name}.lora_A"], found[f"{name}.lora_B"]) for name in modules}
            write_adapter(folder, matrices, rank=self._lora.rank, alpha=self._lora.alpha, base=self._base)

    def _phase(self, stage: StageConfig) -> Phase:
        return Phase(phase_of(stage).keys)  # indexers are frozen with the rest

    def _made(self, stage: StageConfig, cfg: ModelConfig) -> ModelShard:
        model = self._adapted("meta")
        model.cfg, parallel = cfg, self.recipe.parallel
        if parallel.expert > 1 and any(isinstance(module, FrozenExperts) for module in model.modules()):
            raise ConfigError(
                f"parallel.expert: got {parallel.expert}; beside adapters, experts that are stored in FP8 or int4 are "
                "sharded, not dealt out; leave it out"
            )
        compute, depth = model.dtype, self._mtp_depth
        return build(model, self.team, parallel, dtype=torch.float32, compute=compute, mtp_depth=depth, has_base=True)

    def _fill(self, part: ModelShard) -> None:
        """The base from the checkpoint; adapters as they were made, or of the state that the run goes on from."""
        if (old := self.part) is not None:
            fill(part, self.team.rank, lambda name, _: old.local[name].detach(), old.buffers.__getitem__)
            return
        spread(part, self.team, self._adapted("cpu").state_dict() if self.is_first else None)
        if (parts := self.parts) is not None:
            for name, mine in part.local.items():
                if mine.requires_grad:
                    spans = part.places.spans(name, self.team.rank)
                    mine.data.copy_(weight_rows(parts, name, spans).view_as(mine))

    def _adapted(self, device: str) -> Glm5:
        """The whole model of the checkpoint with new adapters."""
        model = load(resolve(self._base), dtype="auto", device=device, changes=self.builder.changes())
        adapt(model, self._lora, self.recipe.seed)
        return model
