"""Shards a model with FSDP2: parameters are gathered while their module runs.

    layer              a unit: gathered for its forward pass, and again for its backward pass
    experts            separate units, sharded over the ranks that have the same experts
    indexer            a unit that stays gathered between forward and backward: in warm-up only it has gradients
    MTP layer          likewise, because it runs several times in a pass
    others             embedding, norm and head: gathered for the entire pass

Gradients are summed in float32 at least, not averaged, because losses are already divided by the totals of all ranks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as AlongDim

from glm5.common.errors import ConfigError
from glm5.model.block import DecoderLayer
from glm5.model.experts import Experts
from glm5.model.glm5 import Glm5
from glm5.model.moe import MoE
from glm5.model.mtp import MTPLayer
from glm5.train.parallel.experts import ExpertParallel
from glm5.train.parallel.row_layout import RowLayout
from glm5.train.parallel.training_group import TrainingGroup


class Root(nn.Module):
    """The root FSDP unit. `forward` calls any function on the model, so that FSDP sees one forward pass of a module.

    A pipeline schedule passes a stage's input and the pass number, for which `on_stage` is called.
    """

    on_stage: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, model: Glm5) -> None:
        super().__init__()
        self.glm = model

    def forward(self, work: Any, *args: Any, number: Tensor | None = None) -> Any:
        if number is None:
            return work(*args)
        assert self.on_stage is not None
        return self.on_stage(work, number)


def use_expert_parallel(model: Glm5, team: TrainingGroup, *, all_gather_tokens: bool) -> None:
    """Replace experts by `ExpertParallel` modules with this rank's part, in place."""
    for layer in _layers(model):
        if isinstance(layer.mlp, MoE) and isinstance(layer.mlp.experts, Experts):
            layer.mlp.experts = ExpertParallel(layer.mlp.experts, team.experts, all_gather_tokens=all_gather_tokens)  # type: ignore[assignment]


def shard(model: Glm5, team: TrainingGroup, layout: RowLayout, dtype: torch.dtype, compute: torch.dtype) -> Root:
    """Shard `model`, after `use_expert_parallel`, by `layout`: parameters in `dtype`, passes in `compute`.

    Raises ConfigError where this torch cannot shard the dtype of a quantized base.
    """
    names = {weight: name for name, weight in model.named_parameters()}
    root = Root(model)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == dtype else compute,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
        cast_forward_inputs=False,
    )
    stage_mesh = DeviceMesh.from_group(team.stage, team.device.type)
    expert_mesh = DeviceMesh.from_group(team.expert_shards, team.device.type)

    def shard_module(module: nn.Module, mesh: DeviceMesh = stage_mesh, *, reshards: bool) -> None:
        has_codes = any(not weight.dtype.is_floating_point for weight in module.parameters())
        try:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=reshards,
                shard_placement_fn=lambda weight: AlongDim(layout.dim(names[weight])),
            )
        except RuntimeError as error:
            if has_codes and "floating point" in str(error):
                raise ConfigError(
                    f"torch {torch.__version__} shards no integers, as a base of int4 codes has; "
                    "train its adapters with one process, or with torch 2.13"
                ) from error
            raise

    reshards = team.mesh.pipeline == 1  # a pipeline has several passes in flight: gathered once for all
    for layer in _layers(model):
        is_mtp = isinstance(layer, MTPLayer)
        if isinstance(layer.mlp, MoE):
            shard_module(layer.mlp.experts, expert_mesh, reshards=reshards and not is_mtp)
        if layer.self_attn.indexer is not None:
            shard_module(layer.self_attn.indexer, reshards=False)
        shard_module(layer, reshards=reshards and not is_mtp)
        if is_mtp:
            register_fsdp_forward_method(layer, "draft")
    shard_module(root, reshards=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other
    return root


def touch(root: Root) -> None:
    """Gather every unit once: the last action of a pipeline needs gradients of all, even of units that never ran."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def local_parameters(model: Glm5) -> dict[str, nn.Parameter]:
    """This rank's rows of its parameters, sharing memory, as parameters for an optimizer."""
    return {
        name: nn.Parameter(_local(weight.data), requires_grad=weight.requires_grad)
        for name, weight in model.named_parameters()
    }


def take_gradients(model: Glm5, local: dict[str, nn.Parameter]) -> None:
    """Move the gradients of the shards to `local`."""
    for name, weight in model.named_parameters():
        if name in local and weight.grad is not None:
            local[name].grad = _local(weight.grad)
        weight.grad = None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layers(model: Glm5) -> Iterator[DecoderLayer]:
    """The decoder layers of this rank, MTP included."""
    return (layer for layer in model.model.layers if isinstance(layer, DecoderLayer))
