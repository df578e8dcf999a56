"""Decoder layers in native code: a small float32 model on a CPU. Parameters stay where they are and what they are.

Native code has copies of the matrices, in the order in which its products read them: other weights are to be announced
(`parameters_moved`). A row's result does not depend on the rows beside it or on the number of threads, bit for bit:
deterministic mode costs nothing here.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from glm5.config.model import ModelConfig
from glm5.engine.runner.inputs.view import StepView
from glm5.kernels import cpu_layer
from glm5.kernels.cpu_layer import Constants, CpuLayers, PackedLinear, Sizes, Weights, available
from glm5.model.block import DecoderLayer
from glm5.model.glm5 import Glm5
from glm5.model.indexer import K_NORM_EPS
from glm5.model.linear import Linear
from glm5.model.moe import MoE
from glm5.model.norm import RMSNorm
from glm5.model.seams import KVView, Rope, Selection


def use_native(model: Glm5, *, by_layer: bool = False) -> bool:
    """Run `model`'s layers in native code from now on, for views of host memory. False, and nothing changed, where that
    cannot be: no compiler, other weights than float32 in host memory, experts in groups. `by_layer`: in one call for
    each layer instead of one for all, with the same results."""
    cfg = model.cfg
    is_plain = all(tensor.is_cpu and tensor.dtype == torch.float32 for tensor in model.state_dict().values())
    if not is_plain or cfg.n_group > 1 or not available():
        return False
    layers = _layers(model)
    if by_layer:
        for layer_idx, layer in enumerate(layers):
            layer.impl = NativeLayer(cfg, layer, layer_idx)
    else:
        recorded = None if model.trunk is None else model.trunk.recorded
        model.trunk = NativeTrunk(cfg, layers[: cfg.num_hidden_layers])
        model.trunk.recorded = recorded
        if cfg.num_nextn_predict_layers:
            layers[-1].impl = NativeLayer(cfg, layers[-1], cfg.num_hidden_layers)
    _replace(model, "lm_head")
    _replace(model.model, "norm")
    if cfg.num_nextn_predict_layers:
        for name in ("enorm", "hnorm", "eh_proj"):
            _replace(model.mtp, name)
        _replace(model.mtp.shared_head, "norm")
    return True


def parameters_moved(model: Glm5) -> None:
    """To be called when parameters may have other values than before, or lie elsewhere in memory."""
    if model.trunk is not None:
        use_native(model)


def release(model: Glm5) -> int:
    """Drop what native code has of the weights, until `parameters_moved`; the bytes that it had."""
    held = [model.trunk, *(layer.impl for layer in _layers(model)), *model.modules()]
    return sum(one.release() for one in held if isinstance(one, NativeTrunk | NativeLayer | NativeLinear))


def _layers(model: Glm5) -> list[DecoderLayer]:
    layers = list(model.model.layers)
    assert all(isinstance(layer, DecoderLayer) for layer in layers), f"{layers=}"
    return cast("list[DecoderLayer]", layers)


def _replace(parent: nn.Module, name: str) -> None:
    """A norm or a linear layer by its native form, over the same parameter."""
    module = getattr(parent, name)
    if isinstance(module, RMSNorm):
        setattr(parent, name, NativeNorm(module))
    elif isinstance(module, Linear):
        setattr(parent, name, NativeLinear(module))
    elif isinstance(module, NativeLinear):
        module.pack()


class NativeNorm(nn.Module):
    """`RMSNorm` in native code."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return cpu_layer.rms_norm(x, self.weight, self.eps)


class NativeLinear(nn.Module):
    """`Linear` in native code."""

    def __init__(self, linear: Linear):
        super().__init__()
        self.weight = linear.weight
        self.pack()

    def pack(self) -> None:
        self.packed: PackedLinear | None = PackedLinear(self.weight)

    def release(self) -> int:
        num_bytes = 0 if self.packed is None else self.packed.num_bytes
        self.packed = None
        return num_bytes

    def forward(self, x: Tensor) -> Tensor:
        assert self.packed is not None, "released"
        return self.packed(x)


class _Native:
    """Consecutive layers over the parameters of `layers`, of which the first is number `first`. `recorded`, if a list,
    gets the experts of each call's rows, int16 [T, MoE layers, A]."""

    recorded: list[Tensor] | None = None

    def __init__(self, cfg: ModelConfig, layers: Sequence[DecoderLayer], first: int):
        self.first, self.count = first, len(layers)
        constants = Constants(cfg.rms_norm_eps, cfg.lora_norm_eps, K_NORM_EPS, cfg.routed_scaling_factor)
        sizes = [_sizes(cfg, is_moe=isinstance(layer.mlp, MoE)) for layer in layers]
        self._run: CpuLayers | None = CpuLayers(sizes, constants, [_weights(layer) for layer in layers])

    def release(self) -> int:
        num_bytes = 0 if self._run is None else self._run.num_bytes
        self._run = None
        return num_bytes

    def run(
        self, x_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None
    ) -> tuple[Tensor, Tensor | None] | None:
        if rope.cis_TR2 is None or not isinstance(view, StepView) or (keys := view.host_keys()) is None:
            return None
        assert self._run is not None, "released"
        given_TK = None if selection is None else selection.keys_TK
        is_given = selection is not None
        return self._run(x_TD, rope.cis_TR2, keys, self.first, given_TK, is_given=is_given, recorded=self.recorded)


class NativeLayer(_Native):
    """A `LayerImpl`."""

    def __init__(self, cfg: ModelConfig, layer: DecoderLayer, layer_idx: int):
        super().__init__(cfg, [layer], layer_idx)

    def __call__(
        self, x_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None
    ) -> tuple[Tensor, Selection] | None:
        if (done := self.run(x_TD, rope, view, selection)) is None:
            return None
        return done[0], Selection(done[1]) if selection is None else selection


class NativeTrunk(_Native):
    """A `TrunkImpl`: between layers in one call nothing waits for Python."""

    def __init__(self, cfg: ModelConfig, layers: Sequence[DecoderLayer]):
        super().__init__(cfg, layers, 0)

    def __call__(self, x_TD: Tensor, rope: Rope, view: KVView, layers: range) -> Tensor | None:
        if len(layers) != self.count or (done := self.run(x_TD, rope, view, None)) is None:
            return None
        return done[0]


def _sizes(cfg: ModelConfig, *, is_moe: bool) -> Sizes:
    return Sizes(
        hidden=cfg.hidden_size,
        heads=cfg.num_attention_heads,
        q_rank=cfg.q_lora_rank,
        kv_rank=cfg.kv_lora_rank,
        nope=cfg.qk_nope_head_dim,
        rope=cfg.qk_rope_head_dim,
        v_dim=cfg.v_head_dim,
        index_heads=cfg.index_n_heads,
        index_dim=cfg.index_head_dim,
        index_topk=cfg.index_topk,
        dense_width=cfg.moe_intermediate_size * cfg.n_shared_experts if is_moe else cfg.intermediate_size,
        experts=cfg.n_routed_experts if is_moe else 0,
        active=cfg.num_experts_per_tok,
        expert_width=cfg.moe_intermediate_size,
        norm_weights=cfg.norm_topk_prob,
    )


def _weights(layer: DecoderLayer) -> Weights[Tensor]:
    attn, indexer, mlp = layer.self_attn, layer.self_attn.indexer, layer.mlp
    moe = mlp if isinstance(mlp, MoE) else None
    dense = mlp if not isinstance(mlp, MoE) else mlp.shared_experts
    return Weights(
        input_norm=layer.input_layernorm.weight,
        q_a=_of(attn.q_a_proj),
        q_a_norm=attn.q_a_layernorm.weight,
        q_b=_of(attn.q_b_proj),
        kv_a=_of(attn.kv_a_proj_with_mqa),
        kv_a_norm=attn.kv_a_layernorm.weight,
        kv_b=_of(attn.kv_b_proj),
        o=_of(attn.o_proj),
        index_q=None if indexer is None else _of(indexer.wq_b),
        index_k=None if indexer is None else _of(indexer.wk),
        index_k_weight=None if indexer is None else indexer.k_norm.weight,
        index_k_bias=None if indexer is None else indexer.k_norm.bias,
        index_w=None if indexer is None else _of(indexer.weights_proj),
        post_norm=layer.post_attention_layernorm.weight,
        gate=_of(dense.gate_proj),
        up=_of(dense.up_proj),
        down=_of(dense.down_proj),
        router=None if moe is None else moe.gate.weight,
        router_bias=None if moe is None else moe.gate.e_score_correction_bias,
        experts_gate_up=None if moe is None else moe.experts.gate_up_proj,
        experts_down=None if moe is None else moe.experts.down_proj,
    )


def _of(linear: Any) -> Tensor:
    return linear.weight
