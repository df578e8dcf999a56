"""The routed experts' sum (model spec 3.6), rows sorted by expert.

    out[t] = sum over t's experts e, in index order:  ( down_e( silu(gate_e x_t) * up_e x_t ) * weight[t, e] ).to(dtype)

The weight multiplies in float32, each summand is rounded to x's dtype, and the sum runs in x's dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.fp8_linear import fp8_linear
from glm5.kernels.grouped_experts.shared import adds_shared, linear


class _Dispatch(torch.autograd.Function):
    """x[t] for every (token, choice) pair, in expert order. Backward is a gather too; indexing's would be a scatter."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, order_G: Tensor, place_TA: Tensor) -> Tensor:
        ctx.save_for_backward(place_TA)
        return x_TD.index_select(0, order_G // place_TA.shape[1])

    @staticmethod
    def backward(ctx, grad_GD: Tensor):
        (place_TA,) = ctx.saved_tensors
        return grad_GD.index_select(0, place_TA.flatten()).unflatten(0, place_TA.shape).sum(dim=1), None, None


class _Undo(torch.autograd.Function):
    """Rows back from expert order to [T, A, D]."""

    @staticmethod
    def forward(ctx, y_GD: Tensor, order_G: Tensor, place_TA: Tensor) -> Tensor:
        ctx.save_for_backward(order_G)
        return y_GD.index_select(0, place_TA.flatten()).unflatten(0, place_TA.shape)

    @staticmethod
    def backward(ctx, grad_TAD: Tensor):
        (order_G,) = ctx.saved_tensors
        return grad_TAD.flatten(0, 1).index_select(0, order_G), None, None


def _swiglu(x_GD: Tensor, gate_up: Tensor | BlockScaled, down: Tensor | BlockScaled) -> Tensor:
    if isinstance(gate_up, BlockScaled):
        gate_GF, up_GF = (fp8_linear(x_GD, half) for half in gate_up.split_gate_up())
    else:
        gate_GF, up_GF = F.linear(x_GD, gate_up).chunk(2, dim=-1)
    hidden_GF = F.silu(gate_GF) * up_GF
    return linear(hidden_GF, down)


def unstack(weight: Tensor | BlockScaled) -> list[Tensor] | list[BlockScaled]:
    """The weight of each expert."""
    # unbind, not weight[e]: its backward stacks once, where each select would fill a gradient of the whole stack.
    if isinstance(weight, BlockScaled):
        return [BlockScaled(*pair) for pair in zip(*(t.unbind(0) for t in weight), strict=True)]
    return list(weight.unbind(0))


@adds_shared
def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
) -> Tensor:
    """[T, D] in x's dtype. Experts that no token chose are not touched."""
    expert_TA, column_TA = expert_TA.long().sort(dim=-1, stable=True)
    weight_TA = weight_TA.gather(1, column_TA)
    flat_G = expert_TA.flatten()
    order_G = flat_G.argsort(stable=True)
    place_TA = torch.empty_like(order_G).scatter_(0, order_G, torch.arange(len(order_G), device=x_TD.device))
    place_TA = place_TA.view_as(expert_TA)

    gate_ups, downs = unstack(gate_up_proj), unstack(down_proj)
    counts = flat_G.bincount(minlength=len(gate_ups)).tolist()
    pieces = _Dispatch.apply(x_TD, order_G, place_TA).split(counts)
    outs = [
        _swiglu(piece_GD, gate_up, down)
        for piece_GD, gate_up, down in zip(pieces, gate_ups, downs, strict=True)
        if len(piece_GD)
    ]
    y_TAD = _Undo.apply(torch.cat([x_TD[:0], *outs]), order_G, place_TA)
    outputs = (y_TAD * weight_TA[..., None]).to(x_TD.dtype).unbind(1)
    return sum(outputs[1:], start=outputs[0])
