"""Arguments of native code, field by field as in layer.h."""

import ctypes
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """Sizes of a layer, named as in layer.h. `experts` 0: a dense layer."""

    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    dense_width: int
    experts: int
    active: int
    expert_width: int
    norm_weights: int


class Constants(NamedTuple):
    """Epsilons of the norms (layers, low-rank, index keys) and the factor of routing weights."""

    eps: float
    lora_eps: float
    index_eps: float
    routed_scale: float


Part = TypeVar("Part")


class Weights(NamedTuple, Generic[Part]):
    """Weights of a layer, [out, in]; None for missing parts. `gate`, `up`, `down`: dense MLP or shared expert."""

    input_norm: Part
    q_a: Part
    q_a_norm: Part
    q_b: Part
    kv_a: Part
    kv_a_norm: Part
    kv_b: Part
    o: Part
    index_q: Part | None
    index_k: Part | None
    index_k_weight: Part | None
    index_k_bias: Part | None
    index_w: Part | None
    post_norm: Part
    gate: Part
    up: Part
    down: Part
    router: Part | None
    router_bias: Part | None
    experts_gate_up: Part | None
    experts_down: Part | None


class Packed(NamedTuple):
    """The same as native code reads them, in the order of layer.h: norms as they are, matrices packed (packed.py)."""

    input_norm: Tensor
    q_a_norm: Tensor
    kv_a_norm: Tensor
    index_k_weight: Tensor | None
    index_k_bias: Tensor | None
    post_norm: Tensor
    router_bias: Tensor | None
    of_input: Tensor
    q_b: Tensor
    key_of_heads: Tensor
    value_of_heads: Tensor
    o: Tensor
    index_q: Tensor | None
    gate_up: Tensor
    down: Tensor
    router: Tensor | None
    experts_gate_up: Tensor | None
    experts_down: Tensor | None


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int32) for name in Sizes._fields],
        *[(name, ctypes.c_float) for name in Constants._fields],
        *[(name, ctypes.c_void_p) for name in Packed._fields],
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("rows", "page_size", "table_step", "table_columns", "threads")],
        *[(name, ctypes.c_void_p) for name in ("table", "request", "end", "place")],
    ]


class PoolStruct(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("page_step", ctypes.c_int64), ("row_step", ctypes.c_int64)]


def shapes(sizes: Sizes) -> Weights[tuple[int, ...]]:
    """Shapes of the weights; None for parts that a dense layer lacks."""
    s, latent = sizes, sizes.kv_rank + sizes.rope
    of_moe = s.experts > 0
    return Weights(
        input_norm=(s.hidden,),
        q_a=(s.q_rank, s.hidden),
        q_a_norm=(s.q_rank,),
        q_b=(s.heads * (s.nope + s.rope), s.q_rank),
        kv_a=(latent, s.hidden),
        kv_a_norm=(s.kv_rank,),
        kv_b=(s.heads * (s.nope + s.v_dim), s.kv_rank),
        o=(s.hidden, s.heads * s.v_dim),
        index_q=(s.index_heads * s.index_dim, s.q_rank),
        index_k=(s.index_dim, s.hidden),
        index_k_weight=(s.index_dim,),
        index_k_bias=(s.index_dim,),
        index_w=(s.index_heads, s.hidden),
        post_norm=(s.hidden,),
        gate=(s.dense_width, s.hidden),
        up=(s.dense_width, s.hidden),
        down=(s.hidden, s.dense_width),
        router=(s.experts, s.hidden) if of_moe else None,
        router_bias=(s.experts,) if of_moe else None,
        experts_gate_up=(s.experts, 2 * s.expert_width, s.hidden) if of_moe else None,
        experts_down=(s.experts, s.hidden, s.expert_width) if of_moe else None,
    )


def check(sizes: Sizes, weights: Weights[Tensor]) -> None:
    """Raises ValueError for weights that are not float32 of these shapes in host memory."""
    wanted = shapes(sizes)._asdict()
    for name, tensor in weights._asdict().items():
        if tensor is not None:
            if not (tensor.is_cpu and tensor.dtype == torch.float32):
                raise ValueError(f"{name}: native layers read float32 in host memory, got {tensor.dtype}")
            if tuple(tensor.shape) != wanted[name]:
                raise ValueError(f"{name}: native layers expect {wanted[name]}, got {tuple(tensor.shape)}")


def layer_struct(sizes: Sizes, constants: Constants, weights: Packed) -> LayerStruct:
    """The struct of a layer, which must not outlive the weights."""
    pointers = {name: None if part is None else part.data_ptr() for name, part in weights._asdict().items()}
    return LayerStruct(**sizes._asdict(), **constants._asdict(), **pointers)
