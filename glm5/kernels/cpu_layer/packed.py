"""Weights as the products of native code read them (products.h): panels of neighbouring outputs, [in, PANEL] each.

So a product reads its weights one after the other, whether it has one row or a thousand. Packed weights are copies.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.cpu_layer.structs import Packed, Sizes, Weights, check


def panels(weight_OI: Tensor, panel: int) -> Tensor:
    """[..., O, I] to [..., O / panel, I, panel], with zeros behind the last output, and room for a panel behind all."""
    missing = -weight_OI.shape[-2] % panel
    padded = F.pad(weight_OI.detach(), (0, 0, 0, missing)).unflatten(-2, (-1, panel)).mT
    room = padded.new_zeros(padded.numel() + panel)
    room[: padded.numel()].view(padded.shape).copy_(padded)
    return room


def pack(sizes: Sizes, weights: Weights[Tensor], panel: int, lanes: int) -> Packed:
    """The weights of a layer. Raises ValueError for those that are not float32 of the layer's shapes in host memory."""
    check(sizes, weights)
    w = weights
    kv_b_HOC = w.kv_b.view(sizes.heads, sizes.nope + sizes.v_dim, sizes.kv_rank)
    of_input = [w.q_a, w.kv_a, *[part for part in (w.index_k, w.index_w) if part is not None]]
    index_q = None
    if w.index_q is not None:  # outputs by dimension, then by head
        by_head = w.index_q.view(sizes.index_heads, sizes.index_dim, sizes.q_rank).transpose(0, 1)
        index_q = F.pad(by_head, (0, 0, 0, -sizes.index_heads % lanes)).flatten(0, 1)

    def packed(weight: Tensor | None) -> Tensor | None:
        return None if weight is None else panels(weight, panel)

    return Packed(
        input_norm=w.input_norm,
        q_a_norm=w.q_a_norm,
        kv_a_norm=w.kv_a_norm,
        index_k_weight=w.index_k_weight,
        index_k_bias=w.index_k_bias,
        post_norm=w.post_norm,
        router_bias=w.router_bias,
        of_input=panels(torch.cat(of_input), panel),
        q_b=panels(w.q_b, panel),
        key_of_heads=panels(kv_b_HOC[:, : sizes.nope].mT, panel),
        value_of_heads=panels(kv_b_HOC[:, sizes.nope :], panel),
        o=panels(w.o, panel),
        index_q=packed(index_q),
        gate_up=panels(torch.cat([w.gate, w.up]), panel),
        down=panels(w.down, panel),
        router=packed(w.router),
        experts_gate_up=packed(w.experts_gate_up),
        experts_down=packed(w.experts_down),
    )
