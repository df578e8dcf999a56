"""Passes of a model over a paged cache, without a scheduler: rows of sequences in, hidden states out."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache, Layout
from glm5.engine.runner.inputs.slot_state import SlotState
from glm5.engine.runner.inputs.view import StepView
from glm5.engine.scheduler.plan import Entered
from glm5.model.glm5 import Glm5


class Steps:
    """`num_slots` sequences of up to `max_len` tokens, each with pages of its own."""

    def __init__(self, model: Glm5, num_slots: int, max_len: int, layout: Layout = "auto"):
        pages = -(-max_len // PAGE_SIZE)
        self.cache = KVCache(
            model.cfg, num_slots * pages, dtype=model.dtype, device=model.device, layout=layout, mtp=True
        )
        self.slots = SlotState(
            num_slots,
            max_len,
            0,
            page_size=PAGE_SIZE,
            dump_page=self.cache.dump_page,
            device=model.device,
        )
        order = torch.randperm(num_slots * pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.slots.enter(
            [
                Entered(slot, slot, [0], tuple(order[slot * pages : (slot + 1) * pages]), 0, 0, None)
                for slot in range(num_slots)
            ]
        )

    def view(
        self, rows: Sequence[tuple[int, int, int]], *, padding: int = 0, whole: bool = False, max_end: int | None = None
    ) -> StepView:
        """Rows (slot, first position, count), one run after the other, and `padding` behind them. `whole`: these are
        whole prompts."""
        device, padding_slot = self.slots.device, len(self.slots.len_Y) - 1
        counts = torch.tensor([count for _, _, count in rows] + [padding])
        slot_B = torch.tensor([slot for slot, _, _ in rows] + [padding_slot])
        group_T = torch.repeat_interleave(torch.arange(len(counts)), counts)
        start_B = torch.tensor([start for _, start, _ in rows] + [0])
        first_B = counts.cumsum(0) - counts
        index_T = torch.arange(int(counts.sum()))
        first_T = first_B[group_T] + (group_T == len(rows)) * len(index_T)
        view = StepView.of(
            self.cache,
            self.slots,
            slot_B=slot_B.to(device),
            group_T=group_T.to(device),
            slot_T=slot_B[group_T].to(device),
            positions_T=(start_B[group_T] + index_T - first_B[group_T]).to(device),
            live_T=(group_T < len(rows)).long().to(device),
            max_end=max_end or max(start + count for _, start, count in rows),
            invariant=False,
        )
        return replace(view, first_T=first_T.int().to(device)) if whole else view


def random_ids(model: Glm5, count: int, seed: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(2, model.cfg.vocab_size, (count,), generator=gen).to(model.device)


def far(got: Tensor, want: Tensor) -> float:
    """Relative RMS distance."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def typically_far(got: Tensor, want: Tensor) -> float:
    """The median over rows. In FP8 a value may fall to the other side of a rounding, and take its row along."""
    return float(((got.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1)).median())
