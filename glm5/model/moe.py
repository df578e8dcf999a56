"""Mixture of experts: a float32 sigmoid router, routed experts and one shared expert (model spec, section 3.6).

    p = sigmoid(x Wg^T)    chosen = top-A of p + bias    w = p[chosen] / (sum + 1e-20) * routed_scaling_factor
    y = sum over chosen of w * expert(x)  +  shared(x)

The bias moves the choice only; the shared expert is not scaled. A router can take recorded experts instead of its own
choice (routing replay, R3, arXiv:2510.11370): a policy is then trained through the experts that it was sampled with.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from glm5.common.errors import TrainingError
from glm5.config.model import ModelConfig
from glm5.kernels.invariant import Impl
from glm5.kernels.router import replay, router
from glm5.model.experts import Experts
from glm5.model.mlp import MLP
from glm5.model.seams import again


class RecordedExperts:
    """Experts [T, A] of the tokens of one pass through a router, ascending; a row with -1 is not known.

    They are taken once in the forward pass, and once more if activations are computed again in the backward pass;
    TrainingError beyond that. `is_used`: whether the forward pass took them.
    """

    def __init__(self, expert_TA: Tensor):
        self._expert_TA, self.is_used, self._is_used_again = expert_TA, False, False

    def take(self, num_tokens: int) -> Tensor:
        if num_tokens != len(self._expert_TA):
            raise TrainingError(f"recorded experts of {len(self._expert_TA)} tokens for a pass of {num_tokens}")
        if self._is_used_again if again() else self.is_used:
            raise TrainingError("recorded experts were to be used a second time: give each pass a record of its own")
        if again():
            self._is_used_again = True
        else:
            self.is_used = True
        return self._expert_TA


class Router(nn.Module):
    """Weights [T, A] float32 and expert ids [T, A] int32 for tokens [T, D]. `impl`: of `kernels.router`. `recorded`:
    the experts of the next pass, where the router is not to choose."""

    impl: Impl = "auto"
    recorded: RecordedExperts | None = None

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.n_routed_experts, cfg.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.n_routed_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        given = x_TD, self.weight, self.e_score_correction_bias
        if self.recorded is not None:
            return replay(*given, self.recorded.take(len(x_TD)), **self._choice)
        return router(*given, **self._choice, impl=self.impl)

    @property
    def _choice(self) -> dict[str, Any]:
        cfg = self.cfg
        return {
            "top_k": cfg.num_experts_per_tok,
            "n_group": cfg.n_group,
            "topk_group": cfg.topk_group,
            "norm_topk_prob": cfg.norm_topk_prob,
            "scaling_factor": cfg.routed_scaling_factor,
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # The spread of the bias is a few bf16 steps: a cast of the model must not round it.
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if moved.dtype in (torch.bfloat16, torch.float16):
            self.e_score_correction_bias = bias.to(moved.device)
        return self


class MoE(nn.Module):
    """Routed experts plus the shared expert, [T, D] to [T, D]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate = Router(cfg)
        self.experts = Experts(cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size)
        self.shared_experts = MLP(cfg.hidden_size, cfg.moe_intermediate_size * cfg.n_shared_experts)

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TA, expert_TA = self.gate(x_TD)
        return self.experts(x_TD, weight_TA, expert_TA) + self.shared_experts(x_TD)
