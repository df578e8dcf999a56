"""The second form of the model, for GPUs: the same weights, run by fused kernels, rule by rule.

    residual add, norm (and quantization)      one kernel: `add_rms_norm`, across layer boundaries (row_sharding.py)
    index key, query and key products of x     a `FusedLinear` of wk, q_a, kv_a; two products if wk is of another kind
    norms, rotation, both writes to the cache  one kernel: `mla_keys`
    queries of attention and indexer           one product, absorbed and rotated by one kernel: `mla_queries`
    all visible keys are read                  the indexer's queries are not computed
    only full prompts in this pass             keys and values are expanded to heads: `prompt_attention`
    routed and shared experts                  one sum: `grouped_experts` with `shared`, or outputs summed later
    gate and up of dense layers                one product, and one kernel for the gated unit
    inputs of products in codes or FP8         quantized by the kernel that computes them
    angles of positions                        looked up

Rules change how sums are rounded, never what is computed: tests/unit/engine/test_two_forms.py compares each with the
model's own modules, and docs/map.md relates the two. `FusedModel` has the methods of `Glm5` that a runner calls.
Tensors derived from weights are recomputed in `refresh`; everything else is a view.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.engine.runner.fused.fused_linear import AnyLinear, FusedLinear, Rows, product, wanted
from glm5.engine.runner.fused.row_sharding import RowSharding, ShardedRows, row_sharding_of
from glm5.engine.runner.inputs.view import StepView
from glm5.kernels.all_reduce.part import PartialSum
from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.fp8_linear.pending import PendingLinear
from glm5.kernels.grouped_experts import FEW_TOKENS, ExpertOutputs, SharedExpert, expert_outputs, grouped_experts
from glm5.kernels.mla_keys import HeadWeights, IndexKeys, PlainLatents, mla_keys, mla_keys_quantized
from glm5.kernels.mla_queries import mla_queries
from glm5.kernels.mla_values import mla_values, mla_values_quantized
from glm5.kernels.prompt_attention import prompt_attention, prompt_attention_quantized
from glm5.kernels.rope import rope_part, rope_table
from glm5.kernels.row_codes import Kind, quantize
from glm5.kernels.swiglu import swiglu, swiglu_quantized
from glm5.model.attention import SparseLatentAttention
from glm5.model.block import DecoderLayer
from glm5.model.experts import BlockScaledExperts, Experts, QuantizedExperts
from glm5.model.glm5 import Glm5
from glm5.model.linear import BlockScaledLinear, Linear, QuantizedLinear
from glm5.model.mlp import MLP
from glm5.model.moe import MoE
from glm5.model.norm import RMSNorm
from glm5.model.seams import Rope, Selection
from glm5.parallel.apply import ParallelEmbedding
from glm5.parallel.group import ALONE, Group

_FEW_ROWS = 16  # up to here `mla_keys` also computes the weights of index heads


class FusedAttention:
    """`SparseLatentAttention` of one layer."""

    def __init__(self, module: SparseLatentAttention):
        self.module, indexer = module, module.indexer
        self.of_input = FusedLinear([*([indexer.wk] if indexer is not None else []), *_latent_linears(module)])
        self.of_query = FusedLinear([module.q_b_proj, *([indexer.wq_b] if indexer is not None else [])])
        self.num_key = module.cfg.index_head_dim if indexer is not None else 0
        self.w_k_HNC, self.w_v_HCV = _absorbed(module)

    @property
    def stacks(self) -> list[FusedLinear]:
        return [self.of_input, self.of_query]

    def refresh(self) -> None:
        """Recompute the absorbed weights in place."""
        for absorbed, new in zip((self.w_k_HNC, self.w_v_HCV), _absorbed(self.module), strict=True):
            absorbed.copy_(new)

    def __call__(
        self, x: Rows, rope: Rope, view: StepView, selection: Selection | None, row_sharding: RowSharding
    ) -> tuple[Tensor | PendingLinear, Selection]:
        """Output [T, D] and the selection used, for `x` [O, D]."""
        module, cfg = self.module, self.module.cfg
        heads, head_dim, layer_idx = cfg.num_attention_heads, module.qk_head_dim, module.layer_idx
        has_key = selection is None
        assert not has_key or module.indexer is not None, f"{layer_idx=}"
        key_TI, qkv_TO = self._of_input(x, row_sharding, has_key=has_key)
        if selection is None and not view.selects(cfg.index_topk):
            selection = Selection(None)
        # Weights of index heads keep the dtype of their product: they are scaled together with the scores.
        head_weights, weights = None, None
        if selection is None:
            assert module.indexer is not None
            weights, head_weights = _head_weights(x.x_TD, module.indexer.weights_proj, row_sharding)
        first_T = None if selection is None or selection.keys_TK is not None else view.first_T
        plain = None if first_T is None else self._plain_room(qkv_TO)
        q_lat = self._keys(qkv_TO, key_TI, weights, rope, view, plain)
        query_TO, index_TO = self._queries(q_lat, row_sharding, has_index=selection is None)
        q_THX = query_TO.unflatten(1, (heads, head_dim))
        if selection is not None and first_T is not None and plain is not None:
            return self._prompt(q_THX, plain, rope, first_T, row_sharding), selection
        rotation, early = (rope.cos_TR2, rope.sin_TR2), None
        if selection is None:
            assert head_weights is not None
            index_TJI = index_TO.unflatten(1, (cfg.index_n_heads, cfg.index_head_dim))
            w_TJ = head_weights.wait()
            own = row_sharding.shard_rows(rotation[0]), row_sharding.shard_rows(rotation[1])
            scale = (cfg.index_head_dim * cfg.index_n_heads) ** -0.5
            # Allocated before selection frees memory, so that queries may be computed while keys are selected.
            early = q_THX.new_empty(len(q_THX), heads, cfg.kv_lora_rank + cfg.qk_rope_head_dim)
            found = view.share(row_sharding.shard).select(layer_idx, index_TJI, w_TJ, cfg.index_topk, scale, own)
            selection = Selection(None if found.keys_TK is None else row_sharding.gather_rows(found.keys_TK))
        impl = "invariant_triton" if view.impl == "invariant_triton" else "auto"
        q_THL = mla_queries(q_THX, self.w_k_HNC, *rotation, early=early, impl=impl)
        out_THC = view.attend(layer_idx, q_THL, selection, scale=head_dim**-0.5, value_dim=cfg.kv_lora_rank)
        return row_sharding.product(self._values(out_THC), module.o_proj), selection

    def _of_input(self, x: Rows, row_sharding: RowSharding, *, has_key: bool) -> tuple[Tensor, Tensor]:
        """(index keys [T, I], empty without `has_key`, and query and key products [T, O]) before norms."""
        if has_key and len(self.of_input.runs) > 1 and not isinstance(row_sharding, ShardedRows):
            # Two products, which need not be concatenated. That of keys is small but slow, so it runs concurrently.
            key = SideStreamResult(lambda: self.of_input(x, 0, 1), x.x_TD.device)
            qkv_TO = self.of_input(x, 1)
            return key.wait(), qkv_TO
        out_TO = row_sharding.gather_rows(self.of_input(x, 0 if has_key or not self.num_key else 1))
        num_key = self.num_key if has_key else 0
        return out_TO[:, :num_key], out_TO[:, num_key:]

    def _keys(
        self,
        qkv_TO: Tensor,
        key_TI: Tensor,
        heads: HeadWeights | None,
        rope: Rope,
        view: StepView,
        plain: PlainLatents | None,
    ) -> Rows:
        """Return the query latent; write latents and index keys, if any, to the cache, and latents to `plain`."""
        module, layer_idx, index = self.module, self.module.layer_idx, None
        if key_TI.shape[1]:
            assert module.indexer is not None
            norm = module.indexer.k_norm
            index = IndexKeys(key_TI, norm.weight, norm.bias, norm.eps, view.cache.index_keys(layer_idx), heads)
        norms = module.q_a_layernorm.weight, module.kv_a_layernorm.weight, module.kv_a_layernorm.eps
        where = rope.cos_TR2, rope.sin_TR2, view.slot_mapping_T, view.cache.latents(layer_idx), index
        kind = self.of_query.wants(len(qkv_TO))
        if kind is None:
            return Rows(mla_keys(qkv_TO, *norms, *where, plain=plain))
        q_TQ, *codes = mla_keys_quantized(qkv_TO, *norms, *where, kind, plain=plain)
        return Rows(q_TQ, (codes[0], codes[1]))

    def _queries(self, q_lat: Rows, row_sharding: RowSharding, *, has_index: bool) -> tuple[Tensor, Tensor]:
        """Queries of heads [T, O], and of the indexer for the rows whose keys this rank selects (empty without
        `has_index`)."""
        num_heads = self.of_query.rows[0]
        if row_sharding.shard.size == 1 or not has_index:
            query_TO = self.of_query(q_lat, 0, 1 + has_index)
            return query_TO[:, :num_heads], query_TO[:, num_heads:]
        codes = (
            None
            if q_lat.quantized is None
            else (row_sharding.shard_rows(q_lat.quantized[0]), row_sharding.shard_rows(q_lat.quantized[1]))
        )
        return self.of_query(q_lat, 0, 1), self.of_query(Rows(row_sharding.shard_rows(q_lat.x_TD), codes), 1)

    def _values(self, out_THC: Tensor) -> Rows:
        """Values of all heads, the input of o_proj."""
        kind = wanted([self.module.o_proj], len(out_THC))
        if kind is None:
            return Rows(mla_values(out_THC, self.w_v_HCV))
        values_TV, *codes = mla_values_quantized(out_THC, self.w_v_HCV, kind)
        return Rows(values_TV, (codes[0], codes[1]))

    def _plain_room(self, qkv_TO: Tensor) -> PlainLatents:
        cfg = self.module.cfg
        return PlainLatents(*(qkv_TO.new_empty(len(qkv_TO), n) for n in (cfg.kv_lora_rank, cfg.qk_rope_head_dim)))

    def _prompt(
        self, q_THX: Tensor, plain: PlainLatents, rope: Rope, first_T: Tensor, row_sharding: RowSharding
    ) -> Tensor | PendingLinear:
        """Attention of full prompts to themselves."""
        module, cfg = self.module, self.module.cfg
        q_THX = rope_part(q_THX, rope.cos_TR2, rope.sin_TR2, None, cfg.qk_nope_head_dim, module.qk_head_dim)
        k_THN = F.linear(plain.kv_TC, self.w_k_HNC.flatten(0, 1)).unflatten(1, (cfg.num_attention_heads, -1))
        v_THV = torch.matmul(plain.kv_TC, self.w_v_HCV).transpose(0, 1)
        given, scale = (q_THX, k_THN, plain.rope_TR, v_THV, first_T), module.qk_head_dim**-0.5
        if wanted([module.o_proj], len(q_THX)) == "blocks":
            out_TV, *codes = prompt_attention_quantized(*given, scale=scale)
            return row_sharding.product(Rows(out_TV, (codes[0], codes[1])), module.o_proj)
        return row_sharding.product(Rows(prompt_attention(*given, scale=scale)[0].flatten(1)), module.o_proj)


class SideStreamResult:
    """A result of a side stream. During graph capture it is computed concurrently with the main stream until `wait`."""

    def __init__(self, compute: Callable[[], Tensor], device: torch.device):
        self._stream = None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._stream = _side_stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                self._result = compute()
        else:
            self._result = compute()

    def wait(self) -> Tensor:
        if self._stream is not None:
            torch.cuda.current_stream(self._result.device).wait_stream(self._stream)
        return self._result


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # as for captures (captured.py)


def _head_weights(
    x_TD: Tensor, linear: AnyLinear, row_sharding: RowSharding
) -> tuple[HeadWeights | None, SideStreamResult]:
    """(inputs if `mla_keys` computes the weights, the weights), for the rows whose keys this rank selects."""
    if len(x_TD) > _FEW_ROWS or not isinstance(linear, Linear) or row_sharding.shard.size > 1:
        return None, SideStreamResult(lambda: product(Rows(x_TD), linear), x_TD.device)
    w_TJ = x_TD.new_empty(len(x_TD), len(linear.weight))
    return HeadWeights(x_TD, linear.weight, w_TJ), SideStreamResult(lambda: w_TJ, torch.device("cpu"))


def _latent_linears(module: SparseLatentAttention) -> list[AnyLinear]:
    return [module.q_a_proj, module.kv_a_proj_with_mqa]


def _absorbed(module: SparseLatentAttention) -> tuple[Tensor, Tensor]:
    """kv_b_proj by heads, as the kernels read it: [H, N, C] of keys, [H, C, V] of values."""
    cfg = module.cfg
    dtype = module.kv_a_layernorm.weight.dtype
    kv_b_HOC = module.kv_b_proj.dense(dtype).detach().unflatten(0, (cfg.num_attention_heads, -1))
    keys, values = kv_b_HOC[:, : cfg.qk_nope_head_dim], kv_b_HOC[:, cfg.qk_nope_head_dim :]
    return keys.contiguous(), values.mT.contiguous()


class FusedMLP:
    """`MLP` of a dense layer or shared expert."""

    def __init__(self, module: MLP):
        self.module = module
        self.gate_up = FusedLinear([module.gate_proj, module.up_proj])

    @property
    def stacks(self) -> list[FusedLinear]:
        return [self.gate_up]

    def __call__(self, x: Rows, view: StepView, row_sharding: RowSharding) -> Tensor | PendingLinear:
        (x,) = row_sharding.gather_inputs(x)
        return row_sharding.product(self._hidden(x), self.module.down_proj)

    def wants(self, num_rows: int, row_sharding: RowSharding) -> Kind | None:
        """How input rows should be quantized."""
        reads_rows = len(self.gate_up.runs) > 1  # sharded rows would be gathered only as codes
        return None if reads_rows and isinstance(row_sharding, ShardedRows) else self.gate_up.wants(num_rows)

    def of(self, x: Rows) -> Tensor:
        """Output for rows that are not sharded."""
        return product(self._hidden(x), self.module.down_proj)

    def _hidden(self, x: Rows) -> Rows:
        gate_up_TO = self.gate_up(x)
        kind = wanted([self.module.down_proj], len(gate_up_TO))
        if kind is None:
            return Rows(swiglu(gate_up_TO))
        hidden_TM, *codes = swiglu_quantized(gate_up_TO, kind)
        return Rows(hidden_TM, (codes[0], codes[1]))


class FusedMoE:
    """`MoE`, with the shared expert as one more of the experts. `recorded` collects the chosen experts."""

    def __init__(self, module: MoE):
        self.module, self.recorded = module, None
        self.recorded: list[Tensor] | None
        # With quantized codes, shared and routed experts may have different formats: then there are two sums.
        has_codes = isinstance(module.experts, QuantizedExperts) or _has_codes(module.shared_experts)
        self.shared_mlp = FusedMLP(module.shared_experts) if has_codes else None

    @property
    def stacks(self) -> list[FusedLinear]:
        return [] if self.shared_mlp is None else self.shared_mlp.stacks

    def __call__(self, x: Rows, view: StepView, row_sharding: RowSharding) -> Tensor | ExpertOutputs:
        experts, mlp = self.module.experts, self.module.shared_experts
        x, weight_TA, expert_TA = row_sharding.gather_inputs(x, *self.module.gate(x.x_TD))
        if self.recorded is not None:
            self.recorded.append(expert_TA)
        if self.shared_mlp is not None:
            choice, plus_TD = (x.x_TD, weight_TA, expert_TA), self.shared_mlp.of(x)
            return experts(*choice, plus_TD) if isinstance(experts, QuantizedExperts) else experts(*choice) + plus_TD
        shared = SharedExpert(_weight(mlp.gate_proj), _weight(mlp.up_proj), _weight(mlp.down_proj))
        given = x.x_TD, *_stacks(experts), weight_TA, expert_TA
        if experts.impl != "auto":
            # Otherwise padding rows would all go to the same experts, one tile after another.
            given = *given[:-1], expert_TA.masked_fill(view.end_T[:, None] == 0, -1)
            return grouped_experts(*given, shared=shared, impl=experts.impl)
        outputs = expert_outputs(*given, shared=shared, quantized=x.quantized)
        return grouped_experts(*given, shared=shared, quantized=x.quantized) if outputs is None else outputs

    def wants(self, num_rows: int, row_sharding: RowSharding) -> Kind | None:
        """How input rows should be quantized."""
        if self.shared_mlp is not None:  # experts as codes read the rows themselves
            return None if isinstance(row_sharding, ShardedRows) else self.shared_mlp.gate_up.wants(num_rows)
        is_fp8 = isinstance(self.module.experts, BlockScaledExperts)
        return "blocks" if is_fp8 and num_rows > FEW_TOKENS else None


def _has_codes(mlp: MLP) -> bool:
    return any(isinstance(linear, QuantizedLinear) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))


def _weight(linear: AnyLinear) -> Tensor | BlockScaled:
    if isinstance(linear, BlockScaledLinear):
        return linear.block_scaled
    return linear.weight


def _stacks(experts: Experts | BlockScaledExperts) -> tuple[Tensor | BlockScaled, Tensor | BlockScaled]:
    if isinstance(experts, BlockScaledExperts):
        gate_up = BlockScaled(experts.gate_up_proj, experts.gate_up_proj_scale_inv)
        return gate_up, BlockScaled(experts.down_proj, experts.down_proj_scale_inv)
    return experts.gate_up_proj, experts.down_proj


class FusedLayer:
    """One decoder layer. The next layer's norm adds its output to the residual stream."""

    def __init__(self, module: DecoderLayer):
        self.module = module
        self.attention = FusedAttention(module.self_attn)
        self.mlp = FusedMoE(module.mlp) if isinstance(module.mlp, MoE) else FusedMLP(module.mlp)

    def __call__(
        self,
        new: PartialSum | None,
        residual_TD: Tensor,
        rope: Rope,
        view: StepView,
        selection: Selection | None,
        row_sharding: RowSharding,
    ) -> tuple[PartialSum, Tensor, Selection]:
        """(this rank's part of the layer's output, the residual stream without it, the selection used)."""
        norm, num_rows = self.module.input_layernorm, len(view.positions_T)
        kind = self.attention.of_input.wants(num_rows)
        if new is None:
            x_TD = norm(residual_TD)
            x = Rows(x_TD, None if kind is None else quantize(x_TD, kind))
        else:
            x, residual_TD = row_sharding.reduce_add_norm(new, residual_TD, norm, kind)
        new_TD, selection = self.attention(x, rope, view, selection, row_sharding)
        norm, kind = self.module.post_attention_layernorm, self.mlp.wants(num_rows, row_sharding)
        x, residual_TD = row_sharding.reduce_add_norm(new_TD, residual_TD, norm, kind)
        return self.mlp(x, view, row_sharding), residual_TD, selection


def _kind(layer: FusedLayer) -> tuple[object, ...]:
    """A key for the layer's kernels: names, shapes and dtypes of its weights."""
    return tuple((name, weight.shape, weight.dtype) for name, weight in layer.module.state_dict(keep_vars=True).items())


def _last(new: PartialSum | None, residual_TD: Tensor, norm: RMSNorm, row_sharding: RowSharding) -> Tensor:
    """All rows of the residual stream after the last layer, normed."""
    if new is None:
        return row_sharding.gather_rows(norm(residual_TD))
    return row_sharding.gather_rows(row_sharding.reduce_add_norm(new, residual_TD, norm, None)[0].x_TD)


def _sum_of(new: PartialSum | None, residual_TD: Tensor) -> Tensor:
    """The residual stream, which the next layer's norm will compute."""
    assert new is None or isinstance(new, Tensor), f"{type(new)=}"
    return residual_TD if new is None else residual_TD + new


class FusedModel:
    """The fused form of `model`, which still owns the weights. `max_len`: number of positions to support.

    `observe`, for plain weights on one rank: `hidden` calls it for each layer with the residual stream [T, D] before
    the layer and the keys that it read, and in the end with the residual stream behind all layers and None.
    """

    observe: Callable[[Tensor, Selection | None], None] | None = None

    def __init__(self, model: Glm5, max_len: int, group: Group = ALONE):
        cfg, trunk = model.cfg, model.model
        self.model, self.group = model, group
        decoders = [layer for layer in trunk.layers if isinstance(layer, DecoderLayer)]
        self.layers = [FusedLayer(layer) for layer in decoders]
        self._run: Sequence[int] = range(cfg.num_hidden_layers)
        positions = torch.arange(max_len, device=model.device)
        self._cos_SR2, self._sin_SR2 = rope_table(positions, cfg.qk_rope_head_dim, cfg.rope_theta, model.dtype)

    @property
    def place(self) -> tuple[int, ...]:
        """The weights' addresses, which captured graphs contain."""
        tensors = (tensor.data_ptr() for tensor in self.model.state_dict(keep_vars=True).values())
        return tuple(tensors)

    def refresh(self) -> None:
        """The model's weights have changed, and may have moved."""
        for layer in self.layers:
            for stack in (*layer.attention.stacks, *layer.mlp.stacks):
                stack.join()
            layer.attention.refresh()

    def record_routing(self) -> list[list[Tensor]]:
        """Start recording: a list for each MoE layer, the MTP layer excepted, that gets the experts of each pass."""
        recorded: list[list[Tensor]] = []
        for layer in islice(self.layers, self.model.cfg.num_hidden_layers):
            if isinstance(layer.mlp, FusedMoE):
                layer.mlp.recorded = []
                recorded.append(layer.mlp.recorded)
        return recorded

    def stop_recording(self) -> None:
        for layer in self.layers:
            if isinstance(layer.mlp, FusedMoE):
                layer.mlp.recorded = None

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Make `hidden` run one decoder layer of each kind: this runs every kernel, with meaningless results."""
        kinds = {
            _kind(layer): layer_idx for layer_idx, layer in reversed(list(enumerate(self.layers[: len(self._run)])))
        }
        complete, self._run = self._run, sorted(kinds.values())
        try:
            yield
        finally:
            self._run = complete

    def hidden(self, ids_T: Tensor, view: StepView) -> Tensor:
        """`Glm5.forward`."""
        cfg, rope, row_sharding = self.model.cfg, self._rope(view.positions_T), row_sharding_of(self.group, len(ids_T))
        new, residual_TD, selection = *self._embedded(ids_T, row_sharding), None
        for layer_idx in self._run:
            inherited = None if cfg.has_indexer(layer_idx) else selection
            layer, before = self.layers[layer_idx], (new, residual_TD)
            new, residual_TD, selection = layer(new, residual_TD, rope, view, inherited, row_sharding)
            if self.observe is not None:
                self.observe(_sum_of(*before), selection)
        if self.observe is not None:
            self.observe(_sum_of(new, residual_TD), None)
        return _last(new, residual_TD, self.model.model.norm, row_sharding)

    def _embedded(self, ids_T: Tensor, row_sharding: RowSharding) -> tuple[Tensor | None, Tensor]:
        """(this rank's part of the embeddings or None, the residual stream); the first layer's norm adds the parts."""
        table = self.model.model.embed_tokens
        if row_sharding.shard.size == 1 or not isinstance(table, ParallelEmbedding):
            return None, row_sharding.shard_rows(table(ids_T))
        part_TD = table.part(ids_T)
        return part_TD, torch.zeros_like(row_sharding.shard_rows(part_TD))

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """`Glm5.head`."""
        return self.model.head(hidden_TD)

    def draft(
        self, next_ids_T: Tensor, hidden_TD: Tensor, view: StepView, selection: Selection | None = None
    ) -> tuple[Tensor, Selection]:
        """`Glm5.draft`."""
        layer, mtp = self.layers[self.model.cfg.num_hidden_layers], self.model.mtp
        row_sharding, rope = row_sharding_of(self.group, len(next_ids_T)), self._rope(view.positions_T)
        merged_TD = row_sharding.shard_rows(mtp.merge(self.model.model.embed_tokens(next_ids_T), hidden_TD))
        new, residual_TD, used = layer(None, merged_TD, rope, view, selection, row_sharding)
        return mtp.handed_on(_last(new, residual_TD, mtp.shared_head.norm, row_sharding)), used

    def _rope(self, positions_T: Tensor) -> Rope:
        # Padding rows may have positions beyond the table.
        slot_mapping_T = positions_T.clamp_max(len(self._cos_SR2) - 1)
        return Rope(self._cos_SR2.index_select(0, slot_mapping_T), self._sin_SR2.index_select(0, slot_mapping_T), None)
