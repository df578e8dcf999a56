"""LoRA: low-rank adapters are trained beside frozen weights, which stay in bfloat16, FP8 or int4 as stored.

    y = x W^T + s (x A^T) B^T        A random, B zero at first; s = alpha / r

Quantized weights are dequantized for each use, forward and backward, and dequantized weights are not saved. Training
uses W with x not quantized; an engine that runs FP8 quantizes x as well.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.checkpoint.adapters import write_adapter
from glm5.checkpoint.load import load
from glm5.checkpoint.resolve import resolve
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.step import LoraConfig
from glm5.config.train import Recipe, StageConfig
from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.grouped_experts import grouped_experts
from glm5.kernels.quantized_weight import QuantizedWeight
from glm5.model.experts import BlockScaledExperts, QuantizedExperts
from glm5.model.glm5 import Glm5
from glm5.model.linear import BlockScaledLinear, Linear, QuantizedLinear
from glm5.train.activation_memory import recompute
from glm5.train.build import Builder, checked_changes
from glm5.train.optim.build import Optimizers
from glm5.train.sharded_state import full_state
from glm5.train.stage_trainer import StageTrainer, device_of
from glm5.train.stages import phase_of
from glm5.train.state import Position, Store
from glm5.train.step import Phase, Step

logger = logging.getLogger(__name__)

AnyLinear = Linear | BlockScaledLinear | QuantizedLinear


class FrozenLinear(nn.Module):
    """A linear layer that passes gradients to its input, whatever its weight is stored as."""

    def __init__(self, base: AnyLinear):
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.base, Linear):
            return self.base(x)
        return recompute(lambda args: F.linear(args, self.base.dense(args.dtype)), x)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.base.dense(dtype)


class LoraLinear(FrozenLinear):
    """A frozen linear layer with a LoRA adapter. Parameters lora_A [r, I] and lora_B [O, r]."""

    def __init__(self, base: AnyLinear, rank: int, alpha: float, device: torch.device):
        super().__init__(base)
        out_features, in_features = base.dense(torch.float32).shape
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, in_features, device=device) * in_features**-0.5)
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))
        return super().forward(x) + self.scale * update


class FrozenExperts(nn.Module):
    """Quantized experts that pass gradients to their input."""

    def __init__(self, base: BlockScaledExperts | QuantizedExperts):
        super().__init__()
        self.base = base

    def forward(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        def run(x_TD: Tensor, weight_TA: Tensor) -> Tensor:
            gate_up, down = (_dense(self.base, name, x_TD.dtype) for name in ("gate_up_proj", "down_proj"))
            return grouped_experts(x_TD, gate_up, down, weight_TA, expert_TA)

        return recompute(run, x_TD, weight_TA)


class LoraTrainer(StageTrainer):
    """Trains and writes only adapters, on a model in the format of its checkpoint."""

    def __init__(self, recipe: Recipe, builder: Builder, saved: Mapping[str, Any] | None) -> None:
        assert recipe.lora is not None
        assert recipe.model.checkpoint is not None
        saved = None if saved is None else full_state(saved, builder.out)
        self.recipe, self.builder, self._saved = recipe, builder, saved
        self.device, self.masters = device_of(recipe.device), None
        base = resolve(recipe.model.checkpoint)
        self.model = load(base, dtype="auto", device=self.device, changes=checked_changes(builder.recipe.model)).train()
        self.adapted = adapt(self.model, recipe.lora, recipe.seed)
        if saved is not None:
            self.model.load_state_dict(saved["model"], strict=False)

    def begin(self, stage: StageConfig, cfg: ModelConfig, before: Optimizers | None) -> Step:
        self.model.cfg = cfg
        optimizers = self._optimizers(self._trained(), cfg, stage, before)
        phase = Phase(phase_of(stage).keys)  # indexers are frozen, too
        self.step = self._step(optimizers, stage, phase)
        return self.step

    def export(self, folder: Path, dtype: str | torch.dtype, assets: Path | None) -> None:
        """Write the adapter, without the base model."""
        lora, checkpoint_name = self.recipe.lora, self.recipe.model.checkpoint
        assert lora is not None
        assert checkpoint_name is not None
        matrices = {name: (module.lora_A, module.lora_B) for name, module in self.adapted.items()}
        write_adapter(folder, matrices, rank=lora.rank, alpha=lora.alpha, base=checkpoint_name)

    def write_state(self, store: Store, position: Position) -> None:
        store.write(position, self._trained(), self.step.optimizers.state_dict())

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}


def adapt(model: Glm5, lora: LoraConfig, seed: int) -> dict[str, LoraLinear]:
    """Freeze `model` and add adapters to the linear layers that `lora` targets; returns these by name. Raises
    ConfigError for a target that no layer has."""
    model.requires_grad_(requires_grad=False)
    adapted: dict[str, LoraLinear] = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, module in list(model.named_modules()):
            parent, _, leaf = name.rpartition(".")
            new: nn.Module | None = None
            if isinstance(module, AnyLinear) and leaf in lora.targets:
                new = adapted[name] = LoraLinear(module, lora.rank, lora.alpha, model.device)
            elif isinstance(module, BlockScaledLinear | QuantizedLinear):
                new = FrozenLinear(module)
            elif isinstance(module, BlockScaledExperts | QuantizedExperts):
                new = FrozenExperts(module)
            if new is not None:
                setattr(model.get_submodule(parent), leaf, new)
    if missing := [target for target in lora.targets if not any(name.endswith(f".{target}") for name in adapted)]:
        raise ConfigError(f"lora.targets: got {missing[0]!r}, and no linear layer of the model is called that")
    count = sum(module.lora_A.numel() + module.lora_B.numel() for module in adapted.values())
    logger.info("%d adapters of rank %d: %s parameters are trained", len(adapted), lora.rank, f"{count:,}")
    return adapted


def _dense(experts: BlockScaledExperts | QuantizedExperts, name: str, dtype: torch.dtype) -> Tensor:
    """The stack [E, O, I] of that name as a plain tensor."""
    weight = getattr(experts, name)
    if isinstance(experts, QuantizedExperts):
        return QuantizedWeight(weight, getattr(experts, f"{name}_scale"), experts.format).dequantize(dtype)
    scale = getattr(experts, f"{name}_scale_inv")
    if name == "down_proj":
        return BlockScaled(weight, scale).dequantize(dtype)
    halves = zip(weight.chunk(2, dim=1), scale.chunk(2, dim=1), strict=True)  # gate and up have grids of their own
    return torch.cat([BlockScaled(data, inverse).dequantize(dtype) for data, inverse in halves], dim=1)
