"""Experts of which every rank of a group has some whole ones: tokens travel to them and back.

    all-to-all   each token, once for each expert it chose, to the rank that has it; its result comes back
    all-gather   all tokens to all ranks; every rank adds up what its experts make of them

Weights are applied where a token came from, and its terms summed up there in the order of its choices.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from glm5.kernels.weighted_rows import weighted_rows
from glm5.model.experts import Experts
from glm5.train.parallel.collectives import Group, all_gather, exchange_rows, gather_rows, scatter_sums


class DealtExperts(nn.Module):
    """`experts`' parameters, but of each the part of this rank. `gathers`: all-gather in place of all-to-all."""

    def __init__(self, experts: Experts, group: Group, *, gathers: bool) -> None:
        super().__init__()
        self._run: Callable[..., Tensor] = type(experts).forward
        self.impl = experts.impl  # which that reads, and parameters by the same names
        self.group, self.gathers = group, gathers
        self.num_experts = len(experts.gate_up_proj)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        for name, weight in experts.named_parameters():
            part = weight.detach().chunk(self.size)[self.rank].clone()
            self.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))

    def forward(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        if self.size == 1:
            return self._run(self, x_TD, weight_TA, expert_TA)
        run = self._gathering if self.gathers else self._travelling
        return run(x_TD, weight_TA, expert_TA.long())

    def _travelling(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        order_P = expert_TA.flatten().argsort(stable=True)
        slot_TA = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
        slot_TA = slot_TA.view(expert_TA.shape)
        count_E = order_P.new_zeros(self.num_experts).index_add_(0, expert_TA.flatten(), torch.ones_like(order_P))
        theirs_E = torch.empty_like(count_E)  # of each rank, the tokens for each of this rank's experts
        dist.all_to_all_single(theirs_E, count_E, group=self.group)
        # Sizes of what travels: here a GPU is waited for.
        sent, received = torch.stack([count_E, theirs_E]).view(2, self.size, -1).sum(dim=2).tolist()
        x_PD = exchange_rows(_Chosen.apply(x_TD, order_P, slot_TA), sent, received, self.group)
        mine_P = torch.arange(self.num_experts // self.size, device=x_TD.device).repeat(self.size)
        y_PD = self._local(x_PD, mine_P.repeat_interleave(theirs_E, output_size=sum(received)), weight_TA.dtype)
        y_PD = exchange_rows(y_PD, received, sent, self.group)
        return _Weighted.apply(y_PD, weight_TA, order_P, slot_TA)

    def _gathering(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        top_k = expert_TA.shape[1]
        sizes_R = torch.empty(self.size, dtype=torch.int64, device=x_TD.device)
        all_gather(sizes_R, torch.tensor([len(x_TD)], device=x_TD.device), group=self.group)
        sizes = sizes_R.tolist()
        all_x, all_weight, all_expert = (gather_rows(rows, sizes, self.group) for rows in (x_TD, weight_TA, expert_TA))
        per_rank = self.num_experts // self.size
        place_P = all_expert.flatten() - self.rank * per_rank
        mine_P = ((place_P >= 0) & (place_P < per_rank)).nonzero().squeeze(1)
        mine_P = mine_P[place_P[mine_P].argsort(stable=True)]
        y_PD = self._local(all_x[mine_P // top_k], place_P[mine_P], weight_TA.dtype)
        weighted_PD = (y_PD * all_weight.flatten()[mine_P, None]).to(x_TD.dtype)
        return scatter_sums(torch.zeros_like(all_x).index_add(0, mine_P // top_k, weighted_PD), sizes, self.group)

    def _local(self, x_PD: Tensor, expert_P: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's experts, one for each row."""
        if not len(x_PD):  # nobody came: gradients are zeros, and asked for
            return x_PD + 0.0 * sum(weight.sum() for weight in self.parameters(recurse=False))
        ones_P1 = torch.ones(len(x_PD), 1, dtype=dtype, device=x_PD.device)
        return self._run(self, x_PD, ones_P1, expert_P[:, None].int())


class _Chosen(torch.autograd.Function):
    """Each token's row once for each expert that it chose. `order_P`: pairs of token and choice, as experts come;
    `slot_TA`: where each of them then lies."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_P: Tensor, slot_TA: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TA)
        return x_TD.index_select(0, order_P // slot_TA.shape[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad_PD,) = grad_outputs
        (slot_TA,) = ctx.saved_tensors
        return weighted_rows(grad_PD, slot_TA, None), None, None


class _Weighted(torch.autograd.Function):
    """The reverse: of each token the sum of its rows, each with its weight, in float32 at least, rounded once."""

    @staticmethod
    def forward(ctx: Any, y_PD: Tensor, weight_TA: Tensor, order_P: Tensor, slot_TA: Tensor) -> Tensor:
        ctx.save_for_backward(y_PD, weight_TA, order_P, slot_TA)
        return weighted_rows(y_PD, slot_TA, weight_TA)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad_TD,) = grad_outputs
        y_PD, weight_TA, order_P, slot_TA = ctx.saved_tensors
        wide_PD = grad_TD.index_select(0, order_P // slot_TA.shape[1]).to(weight_TA.dtype)
        grad_weight_P = (wide_PD * y_PD).sum(dim=1)
        grad_PD = (wide_PD * weight_TA.flatten()[order_P, None]).to(y_PD.dtype)
        return grad_PD, grad_weight_P[slot_TA], None, None
