"""Routing replay (R3, arXiv:2510.11370): training through the experts that the rollout's engine chose.

    weights = p[recorded] / (sum p[recorded] + 1e-20) * routed_scaling_factor        p: the trainer's own scores

So the policy that is trained differs from the one that sampled by rounding alone, never by another expert.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from glm5.common.errors import TrainingError
from glm5.model.glm5 import Glm5
from glm5.model.moe import MoE, RecordedExperts, Router


def routers_of(model: Glm5) -> list[Router]:
    """Of the decoder layers with experts, in order, the MTP layer excepted."""
    layers = list(model.model.layers)[: model.cfg.num_hidden_layers]
    return [layer.mlp.gate for layer in layers if isinstance(layer.mlp, MoE)]


@contextmanager
def replayed_experts(model: Glm5, expert_TLA: Tensor) -> Iterator[None]:
    """Routers take the recorded experts in the one pass, forward and backward, inside the block.

    `expert_TLA`: integers [T, MoE layers, A] for the tokens of the pass, as an engine reports them (`routed_experts`);
    where a row has -1, the router chooses. TrainingError for another number of layers, and if the pass did not take
    every record.
    """
    routers = routers_of(model)
    wanted = len(routers), model.cfg.num_experts_per_tok
    if expert_TLA.dim() != 3 or tuple(expert_TLA.shape[1:]) != wanted:
        raise TrainingError(
            f"recorded experts of shape {list(expert_TLA.shape)}; this model's are [tokens, {wanted[0]}, {wanted[1]}]"
        )
    records = [RecordedExperts(expert_TA) for expert_TA in expert_TLA.unbind(1)]
    try:
        for router, record in zip(routers, records, strict=True):
            router.recorded = record
        yield
    finally:
        for router in routers:
            router.recorded = None
    if unused := [index for index, record in enumerate(records) if not record.is_used]:
        raise TrainingError(f"no pass took the recorded experts of MoE layers {unused}: run the model inside the block")
