"""Quantization-aware training: routed experts as int4 leaves them, while their full weights learn.

    forward    y = experts(x) with fake_int4(w) for w          backward    dw as if w had been used (straight through)

What int4 sees is the weight as the checkpoint will store it, in bfloat16; so the checkpoint packed by `glm5 quantize
--scheme w4a16 --method minmax` is, bit for bit, the model that was trained. The MTP layer stays as it is, as there.
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
"""How checkpoints of such a stage hold their weights."""
MARK = {"bits": 4, "group_size": GROUP}
"""Of a checkpoint's config.json, under `glm5.quant.qat.KEY`."""


class AwareExperts(Experts):
    """`Experts` that compute with what int4 leaves of their weights."""

    def forward(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        gate_up, down = _seen(self.gate_up_proj), _seen(self.down_proj)
        return grouped_experts(x_TD, gate_up, down, weight_TA, expert_TA, impl=self.impl)


def make_aware(model: Glm5, *, aware: bool) -> None:
    """Put `AwareExperts` in the place of the routed experts of all layers but MTP's, or take them out again.

    Parameters stay the same ones, under the same names. Raises ConfigError as `check_widths` does.
    """
    if aware:
        check_widths(model.cfg)
    for layer in model.model.layers[: model.cfg.num_hidden_layers]:
        moe = layer.mlp
        if not isinstance(moe, MoE) or isinstance(old := moe.experts, AwareExperts) == aware:
            continue
        num_experts, hidden_size, width = old.down_proj.shape
        with torch.device("meta"):
            new = (AwareExperts if aware else Experts)(num_experts, hidden_size, width)
        new.gate_up_proj, new.down_proj, new.impl = old.gate_up_proj, old.down_proj, old.impl
        moe.experts = new


def check_widths(cfg: ModelConfig) -> None:
    """Raises ConfigError where a width of the experts is no multiple of the group."""
    hidden_size, width = cfg.hidden_size, cfg.moe_intermediate_size
    if hidden_size % GROUP or width % GROUP:
        raise ConfigError(
            f"qat: experts of {hidden_size} x {width}; both must be multiples of {GROUP}, which share a scale: "
            "hidden_size and moe_intermediate_size in model.config"
        )


def _seen(weight: Tensor) -> Tensor:
    return fake_int4(weight, stored=STORED)
