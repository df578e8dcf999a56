"""Quantization-aware training: the forward pass uses routed experts with fake int4 quantization.

    forward    y = experts(x) with fake_int4(w) for w          backward    dw as if w had been used (straight-through)

Weights are rounded to bfloat16, as in the checkpoint, before they are quantized. So the checkpoint packed by `glm5
quantize --scheme w4a16 --method minmax` is bitwise the model that was trained. The MTP layer is not quantized.
"""

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.kernels.grouped_experts import grouped_experts
from glm5.model.experts import Experts
from glm5.model.glm5 import Glm5
from glm5.model.moe import MoE
from glm5.quant.qat import GROUP, fake_int4

STORED = torch.bfloat16
"""The dtype of weights in checkpoints of such a stage."""
MARK = {"bits": 4, "group_size": GROUP}
"""Value in a checkpoint's config.json under `glm5.quant.qat.KEY`."""


class FakeInt4Experts(Experts):
    """`Experts` that quantize their weights with fake int4 in each forward pass."""

    def forward(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        gate_up, down = (fake_int4(weight, stored=STORED) for weight in (self.gate_up_proj, self.down_proj))
        return grouped_experts(x_TD, gate_up, down, weight_TA, expert_TA, impl=self.impl)


def set_fake_int4(model: Glm5, *, aware: bool) -> None:
    """Turn fake quantization of routed experts on or off, in all layers but MTP's.

    Parameters and their names do not change. Raises ConfigError as `check_widths` does.
    """
    if aware:
        check_widths(model.cfg)
    for layer in model.model.layers[: model.cfg.num_hidden_layers]:
        moe = layer.mlp
        if not isinstance(moe, MoE) or isinstance(old := moe.experts, FakeInt4Experts) == aware:
            continue
        num_experts, hidden_size, width = old.down_proj.shape
        with torch.device("meta"):
            new = (FakeInt4Experts if aware else Experts)(num_experts, hidden_size, width)
        new.gate_up_proj, new.down_proj, new.impl = old.gate_up_proj, old.down_proj, old.impl
        moe.experts = new


def check_widths(cfg: ModelConfig) -> None:
    """Raises ConfigError where a width of the experts is not a multiple of the group."""
    hidden_size, width = cfg.hidden_size, cfg.moe_intermediate_size
    if hidden_size % GROUP or width % GROUP:
        raise ConfigError(
            f"qat: experts of {hidden_size} x {width}; both must be multiples of {GROUP}, which share a scale: "
            "hidden_size and moe_intermediate_size in model.config"
        )
