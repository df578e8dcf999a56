"""Load balancing of experts: loads, the selection bias that is updated from them, and a loss on each sequence.

    b[e] += step (sign(mean load - load[e]) - mean of these signs)      after an optimizer step; only for the selection
    L     = sum over sequences b of T_b sum_e f[b, e] P[b, e]
            f[b, e] = E / (A T_b) #{t in b: e among the top A of p[t]}      P[b, e] = mean over t of p[t, e] / sum p[t]

with p the router's sigmoid scores without the bias (loss-free balancing; DeepSeek-V3 report, 2.1.2). Loads are counted
once, also if activations are recomputed in the backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.model.moe import Router
from glm5.model.seams import again


class Balance:
    """The routers of a model: expert loads since the last `update`, and the auxiliary loss of a forward pass."""

    def __init__(self, model: nn.Module):
        self.routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
        self.loads = {name: self._zeros(router) for name, router in self.routers.items()}
        self._ran: set[str] = set()
        self._losses: list[Tensor] = []
        self.total: Callable[[Tensor], Tensor] | None = None
        """Sums counts over ranks that share sequences (context parallelism); None without such ranks."""

    @contextmanager
    def record(self, row_T: Tensor, *, with_loss: bool, num_rows: int = 0) -> Iterator[None]:
        """Count loads and collect losses in the forward and backward pass inside the block.

        `row_T`: the index of each token's sequence. `num_rows`: the number of sequences, by default max(row_T) + 1.
        """
        self._losses.clear()
        hooks = [
            router.register_forward_hook(self._hook(name, row_T, num_rows, with_loss=with_loss))
            for name, router in self.routers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._losses.clear()

    def losses(self) -> list[Tensor]:
        """L of each router that ran since the last call, in order; a sum over tokens, not a mean."""
        taken = self._losses[:]
        self._losses.clear()
        return taken

    @torch.no_grad()
    def excess(self) -> dict[str, Tensor]:
        """(max - mean) / mean of the expert loads of each router that ran; scalars."""
        loads = {name: self.loads[name].double() for name in self.routers if name in self._ran}
        return {name: load_E.max() / load_E.mean() - 1 for name, load_E in loads.items()}

    @torch.no_grad()
    def update(self, step: float, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        """Update the biases and reset the loads. `reduce` sums a load over the ranks that saw other tokens."""
        for name, router in self.routers.items():
            load_E = self.loads[name].double() if reduce is None else reduce(self.loads[name].double())
            self.loads[name] = self._zeros(router)
            delta_E = step * (load_E.mean() - load_E).sign()  # zeros where nothing was routed
            # Subtracting the mean selects the same experts and keeps the biases small, where float32 is precise.
            router.e_score_correction_bias += (delta_E - delta_E.mean()).to(router.e_score_correction_bias.dtype)
        self._ran.clear()

    def _hook(self, name: str, row_T: Tensor, num_rows: int, *, with_loss: bool) -> Callable[..., None]:
        def count(router: Router, args: tuple[Tensor], routed: tuple[Tensor, Tensor]) -> None:
            if not again():
                self.loads[name] += _bincount(routed[1].flatten().long(), router.weight.shape[0])
                self._ran.add(name)
            if with_loss and torch.is_grad_enabled():
                loss = sequence_loss(
                    args[0], router.weight, row_T, router.cfg.num_experts_per_tok, num_rows=num_rows, total=self.total
                )
                if not again():
                    self._losses.append(loss)

        return count

    @staticmethod
    def _zeros(router: Router) -> Tensor:
        return torch.zeros(router.weight.shape[0], dtype=torch.int64, device=router.weight.device)


def sequence_loss(
    x_TD: Tensor,
    weight_ED: Tensor,
    row_T: Tensor,
    top_k: int,
    *,
    num_rows: int = 0,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """L, a scalar in float32 (float64 for float64): the sum over sequences of T_b sum_e f P. An even load gives 1 per
    token.

    `total`: sums counts over the ranks that share a sequence; L is then this rank's share.
    """
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    p_TE = F.linear(x_TD.to(wide), weight_ED.to(wide)).sigmoid()
    row_T = row_T.long()
    num_rows, num_experts = num_rows or int(row_T.max()) + 1, p_TE.shape[1]
    expert_TA = p_TE.detach().topk(top_k, dim=-1).indices
    length_B = _bincount(row_T, num_rows)
    count_BE = _bincount((row_T[:, None] * num_experts + expert_TA).flatten(), num_rows * num_experts)
    if total is not None:
        length_B, count_BE = total(length_B), total(count_BE)
    share_TE = p_TE / (p_TE.sum(dim=-1, keepdim=True) + 1e-20)
    mean_BE = (
        p_TE.new_zeros(num_rows, num_experts).index_add(0, row_T, share_TE) / length_B.clamp_min(1).to(wide)[:, None]
    )
    return (count_BE.view(num_rows, num_experts).to(wide) * mean_BE).sum() * (num_experts / top_k)


def _bincount(number_G: Tensor, num_numbers: int) -> Tensor:
    """Counts of 0 .. num_numbers - 1, int64. Unlike torch.bincount it does not synchronise with a GPU."""
    return number_G.new_zeros(num_numbers).index_add_(0, number_G, torch.ones_like(number_G))
