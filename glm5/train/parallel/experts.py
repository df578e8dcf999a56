"""Expert parallelism: each rank of a group has some of the experts, and tokens are dispatched to them.

    all-to-all   each token is sent to the rank of each of its experts, and the results are sent back
    all-gather   all tokens are sent to all ranks, and the results of each rank's experts are reduce-scattered

With all-to-all, routing weights are applied on the token's own rank, in the order of its experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from glm5.kernels.weighted_rows import weighted_rows
from glm5.model.experts import Experts
from glm5.train.parallel.collectives import Group, all_gather, exchange_rows, gather_rows, scatter_sums


class ExpertParallel(nn.Module):
    """This rank's part of `experts`, under the same parameter names. `all_gather_tokens`: instead of all-to-all."""

    def __init__(self, experts: Experts, group: Group, *, all_gather_tokens: bool) -> None:
        super().__init__()
        self._run: Callable[..., Tensor] = type(experts).forward
        self.impl = experts.impl  # read by `_run`
        self.group, self.all_gather_tokens = group, all_gather_tokens
        self.num_experts = len(experts.gate_up_proj)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        for name, weight in experts.named_parameters():
            part = weight.detach().chunk(self.size)[self.rank].clone()
            self.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))

    def forward(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        if self.size == 1:
            return self._run(self, x_TD, weight_TA, expert_TA)
        run = self._all_gather if self.all_gather_tokens else self._all_to_all
        return run(x_TD, weight_TA, expert_TA.long())

    def _all_to_all(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        order_G = expert_TA.flatten().argsort(stable=True)
        slot_TA = torch.empty_like(order_G).scatter_(0, order_G, torch.arange(len(order_G), device=order_G.device))
        slot_TA = slot_TA.view(expert_TA.shape)
        count_E = order_G.new_zeros(self.num_experts).index_add_(0, expert_TA.flatten(), torch.ones_like(order_G))
        received_E = torch.empty_like(count_E)  # from each rank, the number of tokens for each of this rank's experts
        dist.all_to_all_single(received_E, count_E, group=self.group)
        # The sizes are needed on the host: this synchronises with the GPU.
        sent, received = torch.stack([count_E, received_E]).view(2, self.size, -1).sum(dim=2).tolist()
        x_GD = exchange_rows(_Dispatch.apply(x_TD, order_G, slot_TA), sent, received, self.group)
        local_G = torch.arange(self.num_experts // self.size, device=x_TD.device).repeat(self.size)
        y_GD = self._local(x_GD, local_G.repeat_interleave(received_E, output_size=sum(received)), weight_TA.dtype)
        y_GD = exchange_rows(y_GD, received, sent, self.group)
        return _Combine.apply(y_GD, weight_TA, order_G, slot_TA)

    def _all_gather(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        top_k = expert_TA.shape[1]
        all_sizes = torch.empty(self.size, dtype=torch.int64, device=x_TD.device)
        all_gather(all_sizes, torch.tensor([len(x_TD)], device=x_TD.device), group=self.group)
        sizes = all_sizes.tolist()
        all_x, all_weight, all_expert = (gather_rows(rows, sizes, self.group) for rows in (x_TD, weight_TA, expert_TA))
        per_rank = self.num_experts // self.size
        local_index_G = all_expert.flatten() - self.rank * per_rank
        local_G = ((local_index_G >= 0) & (local_index_G < per_rank)).nonzero().squeeze(1)
        local_G = local_G[local_index_G[local_G].argsort(stable=True)]
        y_GD = self._local(all_x[local_G // top_k], local_index_G[local_G], weight_TA.dtype)
        weighted_GD = (y_GD * all_weight.flatten()[local_G, None]).to(x_TD.dtype)
        return scatter_sums(torch.zeros_like(all_x).index_add(0, local_G // top_k, weighted_GD), sizes, self.group)

    def _local(self, x_GD: Tensor, expert_G: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply one of this rank's experts to each row."""
        if not len(x_GD):  # no tokens: FSDP needs gradients, which are zeros
            return x_GD + 0.0 * sum(weight.sum() for weight in self.parameters(recurse=False))
        ones_G1 = torch.ones(len(x_GD), 1, dtype=dtype, device=x_GD.device)
        return self._run(self, x_GD, ones_G1, expert_G[:, None].int())


class _Dispatch(torch.autograd.Function):
    """Rows of tokens, repeated for each of their experts. `order_G`: (token, choice) pairs sorted by expert;
    `slot_TA`: the row of each pair."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_G: Tensor, slot_TA: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TA)
        return x_TD.index_select(0, order_G // slot_TA.shape[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad_GD,) = grad_outputs
        (slot_TA,) = ctx.saved_tensors
        return weighted_rows(grad_GD, slot_TA, None), None, None


class _Combine(torch.autograd.Function):
    """The weighted sum of each token's rows, in float32 at least, rounded once."""

    @staticmethod
    def forward(ctx: Any, y_GD: Tensor, weight_TA: Tensor, order_G: Tensor, slot_TA: Tensor) -> Tensor:
        ctx.save_for_backward(y_GD, weight_TA, order_G, slot_TA)
        return weighted_rows(y_GD, slot_TA, weight_TA)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad_TD,) = grad_outputs
        y_GD, weight_TA, order_G, slot_TA = ctx.saved_tensors
        wide_GD = grad_TD.index_select(0, order_G // slot_TA.shape[1]).to(weight_TA.dtype)
        grad_weight_G = (wide_GD * y_GD).sum(dim=1)
        grad_GD = (wide_GD * weight_TA.flatten()[order_G, None]).to(y_GD.dtype)
        return grad_GD, grad_weight_G[slot_TA], None, None
