"""One decoder layer in its inference form; lower.py has the rules.

Attention and MLP each have what a rank computes of its own rows (`of_rows`), and what of all rows for its heads or its
part of every expert; between.py and halves.py say which rows are whose.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from glm5.engine.between import Between, Dealt
from glm5.engine.stack import AnyLinear, Rows, Stack, product, wanted
from glm5.engine.view import StepView
from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.grouped_experts import FEW_TOKENS, SharedExpert, Terms, expert_terms, grouped_experts
from glm5.kernels.mla_keys import HeadWeights, IndexKeys, mla_keys, mla_keys_quantized
from glm5.kernels.mla_queries import mla_queries
from glm5.kernels.mla_values import mla_values, mla_values_quantized
from glm5.kernels.prompt_attention import prompt_attention
from glm5.kernels.rms_norm import rms_norm
from glm5.kernels.rope import rope_part
from glm5.kernels.row_codes import Kind, quantize
from glm5.kernels.swiglu import swiglu, swiglu_quantized
from glm5.model.attention import SparseLatentAttention
from glm5.model.block import DecoderLayer
from glm5.model.experts import BlockScaledExperts, CodedExperts, Experts
from glm5.model.linear import BlockScaledLinear, CodedLinear, Linear
from glm5.model.mlp import MLP
from glm5.model.moe import MoE
from glm5.model.seams import Rope, Selection

_FEW_ROWS = 16  # up to here `mla_keys` computes the weights of index heads along the way


@dataclass(frozen=True)
class PromptKeys:
    """What a rank's heads read of the tokens of a pass of whole prompts, from the first one to wherever it is computed:
    keys [T, H, N], their rotated parts [T, R], values [H, T, V]."""

    key_THN: Tensor
    rope_TR: Tensor
    value_HTV: Tensor


class LoweredAttention:
    """`SparseLatentAttention` of one layer."""

    def __init__(self, module: SparseLatentAttention):
        self.module, indexer = module, module.indexer
        self.of_input = Stack([*([indexer.wk] if indexer is not None else []), *_latent_linears(module)])
        self.of_query = Stack([module.q_b_proj, *([indexer.wq_b] if indexer is not None else [])])
        self.num_key = module.cfg.index_head_dim if indexer is not None else 0
        self.w_k_HNC, self.w_v_HCV = _absorbed(module)

    @property
    def stacks(self) -> list[Stack]:
        return [self.of_input, self.of_query]

    def refresh(self) -> None:
        """Absorb the weights of now, in place."""
        for mine, now in zip((self.w_k_HNC, self.w_v_HCV), _absorbed(self.module), strict=True):
            mine.copy_(now)

    def __call__(
        self, x: Rows, rope: Rope, view: StepView, selection: Selection | None, between: Between
    ) -> tuple[Tensor, Selection]:
        """Output [T, D] and the selection used, of `x` [O, D]."""
        module, cfg = self.module, self.module.cfg
        heads, head_dim, layer_idx = cfg.num_attention_heads, module.qk_head_dim, module.layer_idx
        has_key = selection is None
        assert not has_key or module.indexer is not None, f"{layer_idx=}"
        key_TI, qkv_TY = self._of_input(x, between, has_key=has_key)
        if selection is None and not view.selects(cfg.index_topk):
            selection = Selection(None)
        # Weights of index heads are scaled with the scores: they enter in the dtype that the product has.
        beside, weights = None, None
        if selection is None:
            assert module.indexer is not None
            weights, beside = _head_weights(x.x_TD, module.indexer.weights_proj, between)
        q_lat = self._keys(qkv_TY, key_TI, weights, rope, view)
        query_TY = self.of_query(q_lat, 0, 2 if selection is None else 1)
        q_THX = query_TY[:, : heads * head_dim].unflatten(1, (heads, head_dim))
        if view.first_T is not None and selection is not None and selection.keys_TK is None:
            rows, keys = slice(0, len(qkv_TY)), self.prompt_keys(qkv_TY)
            return self._prompt(q_THX, qkv_TY, keys, rows, rope, view.first_T), selection
        turns, early = (rope.cos_TR2, rope.sin_TR2), None
        if selection is None:
            assert beside is not None
            index_TJI = query_TY[:, heads * head_dim :].unflatten(1, (cfg.index_n_heads, cfg.index_head_dim))
            w_TJ = beside.take()
            scale = (cfg.index_head_dim * cfg.index_n_heads) ** -0.5
            # Taken before selection gives memory back, so that queries may be made while keys are selected.
            early = q_THX.new_empty(len(q_THX), heads, cfg.kv_lora_rank + cfg.qk_rope_head_dim)
            selection = view.select(layer_idx, index_TJI, w_TJ, cfg.index_topk, scale, turns)
        q_THL = mla_queries(q_THX, self.w_k_HNC, *turns, early=early)
        out_THC = view.attend(layer_idx, q_THL, selection, scale=head_dim**-0.5, value_dim=cfg.kv_lora_rank)
        return product(self._values(out_THC), module.o_proj), selection

    def of_rows(self, x: Rows, *, has_key: bool) -> Tensor:
        """Index keys if asked for, query and key products of `x`, side by side [O, Y], before their norms."""
        return self.of_input(x, 0 if has_key or not self.num_key else 1)

    def prompt_keys(self, qkv_TY: Tensor) -> PromptKeys:
        """Room for those of all tokens of a pass; parts that are rotated lie where they were."""
        cfg, num_tokens = self.module.cfg, len(qkv_TY)
        heads, rope_dim = cfg.num_attention_heads, cfg.qk_rope_head_dim
        key_THN = qkv_TY.new_empty(num_tokens, heads, cfg.qk_nope_head_dim)
        return PromptKeys(key_THN, qkv_TY[:, -rope_dim:], qkv_TY.new_empty(heads, num_tokens, cfg.v_head_dim))

    def of_prompt(self, out_TY: Tensor, keys: PromptKeys, rows: slice, rope: Rope, view: StepView) -> Tensor:
        """Output of `rows` of a pass of whole prompts, those before them computed: their keys go to the cache and to
        `keys`. `out_TY`: all rows of `of_rows`, with index keys where the layer has them; rope, view: of `rows`."""
        cfg = self.module.cfg
        heads, head_dim = cfg.num_attention_heads, self.module.qk_head_dim
        key_TI, qkv_TY = out_TY[rows, : self.num_key], out_TY[rows, self.num_key :]
        q_THX = self.of_query(self._keys(qkv_TY, key_TI, None, rope, view), 0, 1).unflatten(1, (heads, head_dim))
        assert view.first_T is not None, f"{rows=}"
        return self._prompt(q_THX, qkv_TY, keys, rows, rope, view.first_T)

    def _of_input(self, x: Rows, between: Between, *, has_key: bool) -> tuple[Tensor, Tensor]:
        """(index keys [T, I], nothing if not asked for, and query and key products [T, Y]) before their norms."""
        if has_key and len(self.of_input.runs) > 1 and not isinstance(between, Dealt):
            # Two products, which as one tensor would be copies; that of keys has few weights and takes as long.
            key = Beside(lambda: self.of_input(x, 0, 1), x.x_TD.device)
            qkv_TY = self.of_input(x, 1)
            return key.take(), qkv_TY
        out_TY = between.whole(self.of_rows(x, has_key=has_key))
        num_key = self.num_key if has_key else 0
        return out_TY[:, :num_key], out_TY[:, num_key:]

    def _keys(
        self,
        qkv_TY: Tensor,
        key_TI: Tensor,
        heads: HeadWeights | None,
        rope: Rope,
        view: StepView,
    ) -> Rows:
        """The query latent; the latents, and index keys if there are any, go to the cache."""
        module, layer_idx, index = self.module, self.module.layer_idx, None
        if key_TI.shape[1]:
            assert module.indexer is not None
            norm = module.indexer.k_norm
            index = IndexKeys(key_TI, norm.weight, norm.bias, norm.eps, view.cache.index_keys(layer_idx), heads)
        norms = module.q_a_layernorm.weight, module.kv_a_layernorm.weight, module.kv_a_layernorm.eps
        where = rope.cos_TR2, rope.sin_TR2, view.place_T, view.cache.latents(layer_idx), index
        kind = self.of_query.wants(len(qkv_TY))
        if kind is None:
            return Rows(mla_keys(qkv_TY, *norms, *where))
        q_TQ, *codes = mla_keys_quantized(qkv_TY, *norms, *where, kind)
        return Rows(q_TQ, (codes[0], codes[1]))

    def _values(self, out_THC: Tensor) -> Rows:
        """Of every head, for the product with o_proj."""
        kind = wanted([self.module.o_proj], len(out_THC))
        if kind is None:
            return Rows(mla_values(out_THC, self.w_v_HCV))
        values_TV, *codes = mla_values_quantized(out_THC, self.w_v_HCV, kind)
        return Rows(values_TV, (codes[0], codes[1]))

    def _prompt(
        self, q_THX: Tensor, qkv_TY: Tensor, keys: PromptKeys, rows: slice, rope: Rope, first_T: Tensor
    ) -> Tensor:
        """Attention of `rows` of whole prompts to themselves and what is before them."""
        module, cfg = self.module, self.module.cfg
        turns, kv_start = (rope.cos_TR2, rope.sin_TR2, None), cfg.q_lora_rank
        q_THX = rope_part(q_THX, *turns, cfg.qk_nope_head_dim, module.qk_head_dim)
        kv_TC = qkv_TY[:, kv_start : kv_start + cfg.kv_lora_rank]
        kv_TC = rms_norm(kv_TC, module.kv_a_layernorm.weight, module.kv_a_layernorm.eps)
        rope_part(keys.rope_TR[rows], *turns, 0, cfg.qk_rope_head_dim)
        torch.mm(kv_TC, self.w_k_HNC.flatten(0, 1).T, out=keys.key_THN[rows].flatten(1))
        torch.bmm(kv_TC.expand(cfg.num_attention_heads, -1, -1), self.w_v_HCV, out=keys.value_HTV[:, rows])
        until = slice(0, rows.stop)
        seen = keys.key_THN[until], keys.rope_TR[until], keys.value_HTV[:, until].transpose(0, 1)
        scale = module.qk_head_dim**-0.5
        out_THV, _ = prompt_attention(q_THX, *seen, first_T, scale=scale, start=rows.start)
        return product(Rows(out_THV.flatten(1)), module.o_proj)


class Beside:
    """A result that nothing waits for until it is taken. In a graph it is computed beside what comes meanwhile."""

    def __init__(self, compute: Callable[[], Tensor], device: torch.device):
        self._stream = None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._stream = _side_stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                self._result = compute()
        else:
            self._result = compute()

    def take(self) -> Tensor:
        if self._stream is not None:
            torch.cuda.current_stream(self._result.device).wait_stream(self._stream)
        return self._result


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _head_weights(x_OD: Tensor, linear: AnyLinear, between: Between) -> tuple[HeadWeights | None, Beside]:
    """(what `mla_keys` is to compute along the way, the weights)."""
    if isinstance(between, Dealt):
        w_TJ = between.whole(product(Rows(x_OD), linear))  # not beside: ranks exchange on one stream
        return None, Beside(lambda: w_TJ, torch.device("cpu"))
    if len(x_OD) > _FEW_ROWS or not isinstance(linear, Linear):
        return None, Beside(lambda: product(Rows(x_OD), linear), x_OD.device)
    w_TJ = x_OD.new_empty(len(x_OD), len(linear.weight))
    return HeadWeights(x_OD, linear.weight, w_TJ), Beside(lambda: w_TJ, torch.device("cpu"))


def _latent_linears(module: SparseLatentAttention) -> list[AnyLinear]:
    return [module.q_a_proj, module.kv_a_proj_with_mqa]


def _absorbed(module: SparseLatentAttention) -> tuple[Tensor, Tensor]:
    """kv_b_proj by heads, as the kernels read it: [H, N, C] for keys, [H, C, V] for values."""
    cfg = module.cfg
    dtype = module.kv_a_layernorm.weight.dtype
    kv_b_HOC = module.kv_b_proj.dense(dtype).detach().unflatten(0, (cfg.num_attention_heads, -1))
    keys, values = kv_b_HOC[:, : cfg.qk_nope_head_dim], kv_b_HOC[:, cfg.qk_nope_head_dim :]
    return keys.contiguous(), values.mT.contiguous()


class LoweredMLP:
    """A dense layer's `MLP`."""

    def __init__(self, module: MLP):
        self.module = module
        self.gate_up = Stack([module.gate_proj, module.up_proj])

    @property
    def stacks(self) -> list[Stack]:
        return [self.gate_up]

    def __call__(self, x: Rows, between: Between) -> Tensor:
        return self.of(*between.gathered(*self.of_rows(x)))

    def of_rows(self, x: Rows) -> tuple[Rows]:
        """What `of` reads of a rank's own rows."""
        return (x,)

    def wants(self, num_rows: int, between: Between) -> Kind | None:
        """How rows should come quantized."""
        reads_rows = len(self.gate_up.runs) > 1  # and dealt rows would be gathered as codes alone
        return None if reads_rows and isinstance(between, Dealt) else self.gate_up.wants(num_rows)

    def of(self, x: Rows) -> Tensor:
        """Of all rows."""
        gate_up_TY, down_proj = self.gate_up(x), self.module.down_proj
        kind = wanted([down_proj], len(gate_up_TY))
        if kind is None:
            return product(Rows(swiglu(gate_up_TY)), down_proj)
        h_TM, *codes = swiglu_quantized(gate_up_TY, kind)
        return product(Rows(h_TM, (codes[0], codes[1])), down_proj)


class LoweredMoE:
    """`MoE`: the shared expert is one more of the experts. `heard` takes down which experts were chosen."""

    def __init__(self, module: MoE):
        self.module, self.heard = module, None
        self.heard: list[Tensor] | None
        # What every token visits is of another kind than codes, or has a scheme of its own: then two sums.
        has_codes = isinstance(module.experts, CodedExperts) or _has_codes(module.shared_experts)
        self.apart = LoweredMLP(module.shared_experts) if has_codes else None

    @property
    def stacks(self) -> list[Stack]:
        return [] if self.apart is None else self.apart.stacks

    def __call__(self, x: Rows, between: Between) -> Tensor | Terms:
        return self.of(*between.gathered(*self.of_rows(x)))

    def of_rows(self, x: Rows) -> tuple[Rows, Tensor, Tensor]:
        """What `of` reads of a rank's own rows: they, their experts' weights and numbers."""
        weight_OA, expert_OA = self.module.gate(x.x_TD)
        return x, weight_OA, expert_OA

    def of(self, x: Rows, weight_TA: Tensor, expert_TA: Tensor) -> Tensor | Terms:
        """Of all rows."""
        experts, mlp = self.module.experts, self.module.shared_experts
        if self.heard is not None:
            self.heard.append(expert_TA)
        if self.apart is not None:
            choice, apart_TD = (x.x_TD, weight_TA, expert_TA), self.apart.of(x)
            return experts(*choice, apart_TD) if isinstance(experts, CodedExperts) else experts(*choice) + apart_TD
        shared = SharedExpert(_weight(mlp.gate_proj), _weight(mlp.up_proj), _weight(mlp.down_proj))
        given = x.x_TD, *_stacks(experts), weight_TA, expert_TA
        if experts.impl == "invariant":
            return grouped_experts(*given, shared=shared, impl="invariant")
        terms = expert_terms(*given, shared=shared, quantized=x.quantized)
        return grouped_experts(*given, shared=shared, quantized=x.quantized) if terms is None else terms

    def wants(self, num_rows: int, between: Between) -> Kind | None:
        """How rows should come quantized."""
        if self.apart is not None:  # experts as codes read the rows themselves
            return None if isinstance(between, Dealt) else self.apart.gate_up.wants(num_rows)
        is_fp8 = isinstance(self.module.experts, BlockScaledExperts)
        return "blocks" if is_fp8 and num_rows > FEW_TOKENS else None


def _has_codes(mlp: MLP) -> bool:
    return any(isinstance(linear, CodedLinear) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))


def _weight(linear: AnyLinear) -> Tensor | BlockScaled:
    if isinstance(linear, BlockScaledLinear):
        return BlockScaled(linear.weight, linear.weight_scale_inv)
    return linear.weight


def _stacks(experts: Experts | BlockScaledExperts) -> tuple[Tensor | BlockScaled, Tensor | BlockScaled]:
    if isinstance(experts, BlockScaledExperts):
        gate_up = BlockScaled(experts.gate_up_proj, experts.gate_up_proj_scale_inv)
        return gate_up, BlockScaled(experts.down_proj, experts.down_proj_scale_inv)
    return experts.gate_up_proj, experts.down_proj


class LoweredLayer:
    """One decoder layer between two norms: what it adds is added by whoever reads it."""

    def __init__(self, module: DecoderLayer):
        self.module = module
        self.attention = LoweredAttention(module.self_attn)
        self.mlp = LoweredMoE(module.mlp) if isinstance(module.mlp, MoE) else LoweredMLP(module.mlp)

    def __call__(
        self,
        new: Tensor | Terms | None,
        residual_OD: Tensor,
        rope: Rope,
        view: StepView,
        selection: Selection | None,
        between: Between,
    ) -> tuple[Tensor | Terms, Tensor, Selection]:
        """(what the layer adds, of ranks that share it a part, the stream without it, the selection used)."""
        norm, num_rows = self.module.input_layernorm, len(view.positions_T)
        kind = self.attention.of_input.wants(num_rows)
        if new is None:
            x_OD = norm(residual_OD)
            x = Rows(x_OD, None if kind is None else quantize(x_OD, kind))
        else:
            x, residual_OD = between.join(new, residual_OD, norm, kind)
        new_TD, selection = self.attention(x, rope, view, selection, between)
        norm, kind = self.module.post_attention_layernorm, self.mlp.wants(num_rows, between)
        x, residual_OD = between.join(new_TD, residual_OD, norm, kind)
        return self.mlp(x, between), residual_OD, selection
