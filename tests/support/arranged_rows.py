"""Rows of a model, arranged anew in every pass: rows of several sequences shuffled into one, chunks of any length, rows
of padding in between, pages anywhere, page tables of any width. What a row's results are must not show any of it."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.config.model import ModelConfig
from glm5.engine.cache.kv_cache import KVCache, Layout
from glm5.engine.runner.forward.passes import Passes
from glm5.engine.runner.inputs.view import StepView
from glm5.kernels.invariant import PASS_ROWS

NUM_SEQS, PAGES_EACH = 6, 3


@dataclass
class Rows:
    """Everything that a model makes of a row, by sequence and position."""

    found: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def add(self, where: list[tuple[int, int] | None], *results: Tensor) -> None:
        for row, place in enumerate(where):
            if place is not None:
                self.found[place] = torch.cat([result[row].double() for result in results])

    def num_unlike(self, others: "Rows") -> int:
        """Rows that differ in any bit (of zeros, not the sign)."""
        assert self.found.keys() == others.found.keys()
        return sum(not torch.equal(self.found[place], others.found[place]) for place in self.found)


class World:
    """Sequences of token ids and one cache, whose pages they hold in a random order."""

    def __init__(self, passes: Passes, ids: list[list[int]], rng: random.Random, *, invariant: bool, layout: Layout):
        self.passes, self.ids, self.rng, self.invariant = passes, ids, rng, invariant
        num_pages, model = NUM_SEQS * PAGES_EACH + 4, passes.model
        self.device = model.device
        self.cache = KVCache(model.cfg, num_pages, dtype=model.dtype, device=model.device, layout=layout, mtp=True)
        pages = rng.sample(range(num_pages), NUM_SEQS * PAGES_EACH)
        self.pages = [pages[i * PAGES_EACH : (i + 1) * PAGES_EACH] for i in range(NUM_SEQS)]
        self.done = [0] * NUM_SEQS
        self.rows = Rows()

    @torch.inference_mode()
    def compute(self, chunks: list[tuple[int, int]], size: int) -> None:
        """One pass of `size` rows: `chunks` are sequences and how many rows each goes on."""
        where: list[tuple[int, int] | None] = []
        for seq, count in chunks:
            where += [(seq, self.done[seq] + i) for i in range(count)]
            self.done[seq] += count
        where += [None] * (size - len(where))
        self.rng.shuffle(where)
        view = self._view(where)
        ids_T, next_T = (
            self._tensor([self.rng.randrange(60) if at is None else self.ids[at[0]][at[1] + ahead] for at in where])
            for ahead in (0, 1)
        )
        hidden_TD = self.passes.hidden(ids_T, view)
        drafted_TD, _ = self.passes.draft(next_T, hidden_TD, view)
        logits = [self.passes.logits(x) for x in (hidden_TD, drafted_TD)]
        self.rows.add(where, hidden_TD, drafted_TD, *logits)

    def _view(self, where: list[tuple[int, int] | None]) -> StepView:
        rng, cache = self.rng, self.cache
        width = PAGES_EACH + rng.randrange(3)
        order = rng.sample(range(NUM_SEQS), NUM_SEQS)  # which row of the table is whose
        tables = [self.pages[seq] + [rng.randrange(cache.num_pages) for _ in range(width)] for seq in order]
        table_BP = self._tensor(tables, torch.int32)[:, :width]
        live = [at is not None for at in where]
        groups = [order.index(at[0]) if at else 0 for at in where]
        positions = [at[1] if at else rng.randrange(9) for at in where]
        places = [
            self.pages[at[0]][at[1] // 64] * 64 + at[1] % 64 if at else cache.dump_page * 64 + rng.randrange(64)
            for at in where
        ]
        return StepView(
            cache=cache,
            table_BP=table_BP,
            positions_T=self._tensor(positions),
            group_T=self._tensor(groups, torch.int32),
            end_T=self._tensor([p + 1 if ok else 0 for p, ok in zip(positions, live, strict=True)], torch.int32),
            slot_mapping_T=self._tensor(places),
            max_end=width * 64,
            invariant=self.invariant,
        )

    def _tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def in_turn(
    passes: Passes, ids: list[list[int]], rng: random.Random, *, invariant: bool = True, layout: Layout = "auto"
) -> Rows:
    """Each sequence by itself, one pass after the other; of as many rows as there are, where passes have no number."""
    world = World(passes, ids, rng, invariant=invariant, layout=layout)
    most = passes.num_rows or PASS_ROWS
    for seq, own in enumerate(ids):
        for first in range(0, len(own) - 1, most):
            count = min(most, len(own) - 1 - first)
            world.compute([(seq, count)], passes.num_rows or count)
    return world.rows


def mixed(
    passes: Passes, ids: list[list[int]], rng: random.Random, *, invariant: bool = True, layout: Layout = "auto"
) -> Rows:
    """Random chunks of random sequences in each pass, often of one row."""
    world = World(passes, ids, rng, invariant=invariant, layout=layout)
    while left := [seq for seq, own in enumerate(ids) if world.done[seq] < len(own) - 1]:
        room, chunks = rng.randint(1, passes.num_rows or PASS_ROWS), []
        for seq in rng.sample(left, rng.randint(1, len(left))):
            most = min(room, len(ids[seq]) - 1 - world.done[seq])
            if most:
                chunks.append((seq, rng.choice([1, rng.randint(1, most)])))
                room -= chunks[-1][1]
        world.compute(chunks, passes.num_rows or sum(count for _, count in chunks))
    return world.rows


def make_ids(cfg: ModelConfig, rng: random.Random) -> list[list[int]]:
    lengths = [rng.randint(2, 150) for _ in range(NUM_SEQS)]
    return [[rng.randrange(cfg.vocab_size) for _ in range(length)] for length in lengths]
