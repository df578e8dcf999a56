"""The experts of each token and their weights (model spec 3.6), in float32.

    p = sigmoid(x W^T);   chosen = top_k of p + bias, within the topk_group best of n_group groups of experts
    weight = p[chosen] / (sum p[chosen] + 1e-20) * scaling_factor          (the division only with norm_topk_prob)

The bias affects the choice but not the weight. The score of a group is the sum of its two best experts. Order in both
steps: larger score first, then smaller index.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.top_k import top_k as best

_FEW = 1 << 11  # scores up to which the overhead of ops dominates


def router(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """(weight [T, A] float32, expert [T, A] int32 in ascending order); float64 stays float64."""
    return choose(
        _scores(x_TD, weight_ED),
        bias_E,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        scaling_factor=scaling_factor,
    )


def replay(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, recorded_TA: Tensor, **choice: Any
) -> tuple[Tensor, Tensor]:
    """As `router`, whose keywords `choice` are, where a row of `recorded_TA` without -1 is the choice."""
    return choose(_scores(x_TD, weight_ED), bias_E, recorded_TA, **choice)


def choose(
    p_TE: Tensor,
    bias_E: Tensor,
    recorded_TA: Tensor | None = None,
    *,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """The experts and weights for scores p. The weights come from all scores, so that a recorded choice, which is not
    the router's own, has a gradient too."""
    expert_TA = _best_experts(p_TE, bias_E, top_k=top_k, n_group=n_group, topk_group=topk_group)
    if recorded_TA is not None:
        is_known_T1 = (recorded_TA >= 0).all(dim=-1, keepdim=True)
        expert_TA = torch.where(is_known_T1, recorded_TA.long(), expert_TA)
    weight_TA = p_TE.gather(1, expert_TA)
    if norm_topk_prob:
        weight_TA = weight_TA / (weight_TA.sum(dim=-1, keepdim=True) + 1e-20)
    return weight_TA * scaling_factor, expert_TA.int()


def _scores(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(wide), weight_ED.to(wide)).sigmoid()


def _best_experts(p_TE: Tensor, bias_E: Tensor, *, top_k: int, n_group: int, topk_group: int) -> Tensor:
    """int64 [T, A], ascending."""
    choice_TE = p_TE.detach() + bias_E.to(p_TE.dtype)
    if n_group > 1:
        choice_TGE = choice_TE.unflatten(-1, (n_group, -1))
        group_TG = best(choice_TGE.topk(2, dim=-1).values.sum(dim=-1), topk_group).long()
        out_TG = torch.ones_like(choice_TGE[..., 0], dtype=torch.bool).scatter_(1, group_TG, value=0)
        choice_TE = choice_TGE.masked_fill(out_TG[..., None], float("-inf")).flatten(-2)
    return _few_best(choice_TE, top_k) if choice_TE.numel() <= _FEW else best(choice_TE, top_k).long()


def _few_best(choice_TE: Tensor, top_k: int) -> Tensor:
    """The best of few scores, int64, by sorting rows, which takes fewer ops."""
    order_TE = choice_TE.sort(dim=-1, descending=True, stable=True).indices
    return order_TE[:, :top_k].sort(dim=-1).values
