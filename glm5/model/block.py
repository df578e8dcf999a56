"""One decoder layer: x += attention(norm(x)); x += mlp(norm(x))."""

from torch import Tensor, nn

from glm5.config.model import ModelConfig
from glm5.model.attention import SparseLatentAttention
from glm5.model.mlp import MLP
from glm5.model.moe import MoE
from glm5.model.norm import RMSNorm
from glm5.model.seams import KVView, LayerImpl, Rope, Selection


class DecoderLayer(nn.Module):
    """Layer `layer_idx`, dense or mixture of experts as the config says."""

    impl: LayerImpl | None = None
    """Another way to compute the layer, where it can."""

    def __init__(self, cfg: ModelConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = SparseLatentAttention(cfg, layer_idx)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MoE(cfg) if cfg.is_moe(layer_idx) else MLP(cfg.hidden_size, cfg.intermediate_size)

    def forward(self, x_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None) -> tuple[Tensor, Selection]:
        if self.impl is not None and (done := self.impl(x_TD, rope, view, selection)) is not None:
            return done
        return self.compute(x_TD, rope, view, selection)

    def compute(self, x_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None) -> tuple[Tensor, Selection]:
        """The layer as torch operations."""
        attn_TD, selection = self.self_attn(self.input_layernorm(x_TD), rope, view, selection)
        x_TD = x_TD + attn_TD
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD)), selection
