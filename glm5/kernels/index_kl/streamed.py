"""index_kl for some queries at a time, with the gradient computed in forward: no tensor of size T x S or T x K x L.

    dKL / dscore[t, s] = softmax(score[t, :])[s] - P[t, s]        (exact where P sums to 1)

The loss is a scalar, so forward can compute its gradient up to a factor. No query, latent or probability of attention
is saved for backward. `by_tiles` multiplies with every key up to the last visible one; `by_keys` gathers the K selected
ones, which is cheaper if the context is many times K.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.kernels.index_kl.reference import Served
from glm5.kernels.paging import key_slots, read_rows
from glm5.kernels.tiles import Tile, TileReader, block_length, dense_logits, plan_tiles

_GATHER_FROM = 10  # keys in context per key selected, as sparse_mla has it
_GATHERED = {"cpu": 1 << 20}  # latent values gathered at a time
_GATHERED_ELSEWHERE = 1 << 25


def index_kl(
    q_TJI: Tensor,
    key_PZI: Tensor,
    w_TJ: Tensor,
    served: list[Served],
    keys_TK: Tensor | None,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    index_scale: float,
    scale: float,
) -> Tensor:
    """As `reference.index_kl`. Keys of a query must be distinct."""
    where = (keys_TK, page_table_BN, row_T, end_T)
    return _IndexKl.apply(q_TJI, key_PZI, w_TJ, served, where, index_scale, scale)


class _IndexKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TJI, key_PZI, w_TJ, served: list[Served], where, index_scale: float, scale: float):
        keys_TK, page_table_BN, _, end_T = where
        pass_ = _Pass(q_TJI, key_PZI, w_TJ, served, where, index_scale, scale, needs_grad=any(ctx.needs_input_grad))
        context = min(page_table_BN.shape[1] * key_PZI.shape[1], int(end_T.max()) if len(end_T) else 0)
        if keys_TK is not None and context > _GATHER_FROM * keys_TK.shape[1]:
            pass_.by_keys()
        else:
            pass_.by_tiles()
        if pass_.needs_grad:
            ctx.save_for_backward(pass_.grad_q, pass_.grad_key.to(key_PZI.dtype), pass_.grad_w)
        return pass_.loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return *(one * grad.to(one.dtype) for one in ctx.saved_tensors), None, None, None, None


class _Pass:
    """One pass over the queries that accumulates `loss` and, with `needs_grad`, the gradients."""

    def __init__(self, q_TJI, key_PZI, w_TJ, served: list[Served], where, index_scale: float, scale, *, needs_grad):
        self.q_TJI, self.key_PZI, self.w_TJ, self.served = q_TJI, key_PZI, w_TJ, served
        self.keys_TK, self.page_table_BN, self.row_T, self.end_T = where
        self.index_scale, self.scale, self.needs_grad = index_scale, scale, needs_grad
        self.wide = torch.promote_types(q_TJI.dtype, torch.float32)
        self.num_heads = max(q_TJI.shape[1], *(q_THL.shape[1] for q_THL, _, _ in served))
        self.loss = torch.zeros((), dtype=self.wide, device=q_TJI.device)
        if needs_grad:
            self.grad_q, self.grad_w = torch.zeros_like(q_TJI), torch.zeros_like(w_TJ)
            self.grad_key = torch.zeros_like(key_PZI, dtype=self.wide)

    def by_tiles(self) -> None:
        reader = TileReader(self.page_table_BN, self.key_PZI.shape[1])
        for tile in plan_tiles(self.row_T, self.end_T, self.num_heads):
            blocks = block_length(tile, self.num_heads, self.q_TJI.device)
            part, shape = tile.queries, (tile.stop - tile.start, tile.num_keys)
            q_TJI, w_TJ = self.q_TJI[part].to(self.wide), self.w_TJ[part].to(self.wide)
            score_TS = torch.empty(shape, dtype=self.wide, device=q_TJI.device)
            hits_TJS = None
            for keys, key_GSI in reader.blocks(self.key_PZI, tile, blocks):
                hits_TJS = dense_logits(q_TJI, key_GSI.to(self.wide), self.index_scale).relu_()
                score_TS[:, keys] = torch.bmm(w_TJ.unsqueeze(1), hits_TJS).squeeze(1)
            grad_TS = self._compare_tile(tile, score_TS, self._tile_target(reader, tile, blocks))
            if not self.needs_grad:
                continue
            grad_q_TJI = torch.zeros_like(q_TJI)
            for keys, key_GSI in reader.blocks(self.key_PZI, tile, blocks):
                key_GSI = key_GSI.to(self.wide)
                if hits_TJS is None or hits_TJS.shape[2] != tile.num_keys:  # more than one block: only the last is left
                    hits_TJS = dense_logits(q_TJI, key_GSI, self.index_scale).relu_()
                grad_hits_TJS = self._grad_hits(part, w_TJ, hits_TJS, grad_TS[:, keys])
                hits_TJS = None
                grad_GQS = grad_hits_TJS.view(len(tile.rows), -1, key_GSI.shape[1])
                grad_q_TJI += torch.bmm(grad_GQS, key_GSI).view_as(q_TJI)
                q_GQI = q_TJI.reshape(len(tile.rows), -1, key_GSI.shape[-1])
                self._add_keys(tile, keys, torch.bmm(grad_GQS.mT, q_GQI))
            self.grad_q[part] = grad_q_TJI

    def by_keys(self) -> None:
        assert self.keys_TK is not None
        num_queries, page_size = len(self.q_TJI), self.key_PZI.shape[1]
        width = max(latent.shape[-1] for _, latent, _ in self.served)
        values = _GATHERED.get(self.q_TJI.device.type, _GATHERED_ELSEWHERE)
        step = max(1, values // max(1, self.keys_TK.shape[1] * width))
        for start in range(0, num_queries, step):
            part = slice(start, start + step)
            keys_TK = self.keys_TK[part]
            hidden_TK = (keys_TK < 0) | (keys_TK >= self.end_T[part, None])
            slots_TK = key_slots(keys_TK.masked_fill(hidden_TK, 0), self.page_table_BN, self.row_T[part], page_size)

            def rows(pool: Tensor, slots_TK: Tensor = slots_TK, hidden_TK: Tensor = hidden_TK) -> Tensor:
                return read_rows(pool, slots_TK).masked_fill(hidden_TK[..., None], 0.0).to(self.wide)

            target_TK = torch.zeros(slots_TK.shape, dtype=self.wide, device=slots_TK.device)
            for q_THL, latent_PZL, lse_TH in self.served:
                logits_THK = torch.einsum("thl,tkl->thk", q_THL[part].to(self.wide), rows(latent_PZL)).mul_(self.scale)
                target_TK += logits_THK.sub_(lse_TH[part, :, None]).exp_().mean(dim=1)
            key_TKI = rows(self.key_PZI)
            q_TJI, w_TJ = self.q_TJI[part].to(self.wide), self.w_TJ[part].to(self.wide)
            hits_TJK = torch.einsum("tji,tki->tjk", q_TJI, key_TKI).mul_(self.index_scale).relu_()
            score_TK = torch.bmm(w_TJ.unsqueeze(1), hits_TJK).squeeze(1)
            grad_TK = self._compare(score_TK, target_TK, hidden_TK)
            if self.needs_grad:
                grad_hits_TJK = self._grad_hits(part, w_TJ, hits_TJK, grad_TK)
                self.grad_q[part] = torch.einsum("tjk,tki->tji", grad_hits_TJK, key_TKI)
                grad_TKI = torch.einsum("tjk,tji->tki", grad_hits_TJK, q_TJI)
                self.grad_key.flatten(0, 1).index_add_(0, slots_TK.flatten(), grad_TKI.flatten(0, 1))

    def _tile_target(self, reader: TileReader, tile: Tile, blocks: int) -> Tensor:
        """Sum over served layers of the head-averaged attention [T, S] of a tile, as if nothing were hidden."""
        part = tile.queries
        target_TS = torch.zeros(tile.stop - tile.start, tile.num_keys, dtype=self.wide, device=self.q_TJI.device)
        for q_THL, latent_PZL, lse_TH in self.served:
            wide_q_THL = q_THL[part].to(self.wide)
            for keys, latent_GSL in reader.blocks(latent_PZL, tile, blocks):
                logits_THS = dense_logits(wide_q_THL, latent_GSL.to(self.wide), self.scale)
                target_TS[:, keys] += logits_THS.sub_(lse_TH[part, :, None]).exp_().mean(dim=1)
        return target_TS

    def _compare_tile(self, tile: Tile, score_TS: Tensor, target_TS: Tensor) -> Tensor:
        """Adds the tile's KL, over the selected keys where there is a selection; d KL / d score [T, S]."""
        end_T1 = self.end_T[tile.queries, None]
        if self.keys_TK is None:
            hidden_TS = torch.arange(tile.num_keys, device=end_T1.device) >= end_T1
            return self._compare(score_TS, target_TS, hidden_TS)
        keys_TK = self.keys_TK[tile.queries].long()
        hidden_TK = (keys_TK < 0) | (keys_TK >= end_T1)
        inside_TK = keys_TK.masked_fill(hidden_TK, 0)
        grad_TK = self._compare(score_TS.gather(1, inside_TK), target_TS.gather(1, inside_TK), hidden_TK)
        return torch.zeros_like(score_TS).scatter_add_(1, inside_TK, grad_TK)

    def _compare(self, score: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
        target = target.masked_fill(hidden, 0.0).div_(len(self.served))
        log_q = score.masked_fill(hidden, float("-inf")).log_softmax(dim=-1).masked_fill_(hidden, 0.0)
        self.loss += (torch.special.xlogy(target, target) - target * log_q).sum()
        # Times P's sum, which is 1 but for rounding: then it is the gradient of what was computed.
        return log_q.exp_().masked_fill_(hidden, 0.0).mul_(target.sum(dim=-1, keepdim=True)).sub_(target)

    def _grad_hits(self, part: slice, w_TJ: Tensor, hits_TJS: Tensor, grad_TS: Tensor) -> Tensor:
        """Adds to w's gradient; d KL / d (q . key) [T, J, S]."""
        self.grad_w[part] += (hits_TJS * grad_TS.unsqueeze(1)).sum(dim=-1).to(self.grad_w.dtype)
        grad_hits_TJS = (self.index_scale * w_TJ).unsqueeze(-1) * grad_TS.unsqueeze(1)
        return torch.ops.aten.threshold_backward(grad_hits_TJS, hits_TJS, 0)

    def _add_keys(self, tile: Tile, keys: slice, grad_GSI: Tensor) -> None:
        """Adds to the gradients of a tile's keys `keys`."""
        first = torch.tensor(tile.rows, device=grad_GSI.device)
        span = torch.arange(keys.start, keys.stop, device=grad_GSI.device)
        rows_G = first.repeat_interleave(len(span))
        slots_GS = key_slots(
            span.repeat(len(tile.rows)).unsqueeze(1), self.page_table_BN, rows_G, self.key_PZI.shape[1]
        ).flatten()
        ends_G = torch.tensor(tile.ends, device=grad_GSI.device)
        grad_GSI = grad_GSI.masked_fill((span >= ends_G[:, None]).unsqueeze(-1), 0.0)
        slots_GS = slots_GS.masked_fill((span >= ends_G[:, None]).flatten(), 0)
        self.grad_key.flatten(0, 1).index_add_(0, slots_GS, grad_GSI.flatten(0, 1))
