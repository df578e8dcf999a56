"""FSDP2 around a model: each parameter in shards, whole while the module that has it runs.

    layer              a unit: gathered before its pass, and again before its backward pass
    experts            units of their own, sharded over the ranks that have the same experts
    indexer            a unit that stays gathered between the passes: in warm-up it alone has gradients
    MTP layer          likewise, as it runs several times in a pass
    the rest           embedding, norm and head: gathered for the whole pass

Gradients are added up in float32 at least, not averaged: a loss is a share of the whole run's.
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
from glm5.train.parallel.experts import DealtExperts
from glm5.train.parallel.row_layout import RowLayout
from glm5.train.parallel.training_group import TrainingGroup


class Root(nn.Module):
    """Runs any work on the model's weights: FSDP sees one module's pass, whatever parts of the model are called.

    A pipeline's schedule, which gives a stage its input and the number of the pass, gets what `on_stage` makes of it.
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


def deal_experts(model: Glm5, team: TrainingGroup, *, gathers: bool) -> None:
    """Leave every rank its own experts, and the way to those of others."""
    for layer in _layers(model):
        if isinstance(layer.mlp, MoE) and isinstance(layer.mlp.experts, Experts):
            layer.mlp.experts = DealtExperts(layer.mlp.experts, team.experts, gathers=gathers)  # type: ignore[assignment]


def shard(model: Glm5, team: TrainingGroup, places: RowLayout, dtype: torch.dtype, compute: torch.dtype) -> Root:
    """`model`, whose experts are dealt, in shards as `places` says: parameters in `dtype`, passes in `compute`.

    Raises ConfigError where this torch cannot shard what a base is stored in.
    """
    names = {weight: name for name, weight in model.named_parameters()}
    root = Root(model)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == dtype else compute,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
        cast_forward_inputs=False,
    )
    everybody = DeviceMesh.from_group(team.stage, team.device.type)
    sharers = DeviceMesh.from_group(team.expert_shards, team.device.type)

    def unit(module: nn.Module, mesh: DeviceMesh = everybody, *, reshards: bool) -> None:
        has_codes = any(not weight.dtype.is_floating_point for weight in module.parameters())
        try:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=reshards,
                shard_placement_fn=lambda weight: AlongDim(places.dim(names[weight])),
            )
        except RuntimeError as error:
            if has_codes and "floating point" in str(error):
                raise ConfigError(
                    f"torch {torch.__version__} shards no integers, as a base of int4 codes has; "
                    "train its adapters with one process, or with torch 2.13"
                ) from error
            raise

    reshards = team.mesh.pipeline == 1  # a pipeline has several passes under way: gathered once for all of them
    for layer in _layers(model):
        is_mtp = isinstance(layer, MTPLayer)
        if isinstance(layer.mlp, MoE):
            unit(layer.mlp.experts, sharers, reshards=reshards and not is_mtp)
        if layer.self_attn.indexer is not None:
            unit(layer.self_attn.indexer, reshards=False)
        unit(layer, reshards=reshards and not is_mtp)
        if is_mtp:
            register_fsdp_forward_method(layer, "draft")
    unit(root, reshards=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return root


def touch(root: Root) -> None:
    """Gather every unit once: a pipeline's last action asks all of them for gradients, those too that never ran."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def local_parameters(model: Glm5) -> dict[str, nn.Parameter]:
    """This rank's rows of every parameter that it has, in the same memory, as parameters for an optimizer."""
    return {
        name: nn.Parameter(_local(weight.data), requires_grad=weight.requires_grad)
        for name, weight in model.named_parameters()
    }


def take_gradients(model: Glm5, local: dict[str, nn.Parameter]) -> None:
    """Hand the gradients of shards to `local`; the model's are then gone."""
    for name, weight in model.named_parameters():
        if name in local and weight.grad is not None:
            local[name].grad = _local(weight.grad)
        weight.grad = None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layers(model: Glm5) -> Iterator[DecoderLayer]:
    """Those that this rank has."""
    return (layer for layer in model.model.layers if isinstance(layer, DecoderLayer))
