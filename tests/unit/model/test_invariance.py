"""A row's results are its own: bit for bit the same wherever it stands in its pass, whoever stands beside it.

Sequences are computed one after the other, then in random arrangements: rows of several of them shuffled into one pass,
chunks of any length, rows of padding in between, pages anywhere, page tables of any width.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.config.presets import preset
from glm5.engine.kv import KVCache, Layout
from glm5.engine.view import StepView
from glm5.kernels.invariant import PASS_ROWS
from glm5.model.glm5 import Glm5
from glm5.model.lowering import use_invariant
from tests.support.models import random_model

NUM_SEQS, PAGES_EACH = 6, 3
# Widths that no vector divides; rows of 16 bytes, as kernels/invariant.py asks for.
ODD = {
    "hidden_size": 36,
    "num_attention_heads": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "index_n_heads": 5,
    "index_head_dim": 12,
    "index_topk": 50,
    "moe_intermediate_size": 20,
    "intermediate_size": 44,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "vocab_size": 67,
}
CONFIGS = {
    "tiny": preset("tiny"),
    "odd widths": preset("tiny").replace(**ODD),
    "one head, one key": preset("tiny").replace(num_attention_heads=1, index_n_heads=1, index_topk=1, v_head_dim=20),
}


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

    def __init__(
        self, model: Glm5, ids: list[list[int]], rng: random.Random, *, invariant: bool, layout: Layout = "auto"
    ):
        self.model, self.ids, self.rng, self.invariant = model, ids, rng, invariant
        num_pages = NUM_SEQS * PAGES_EACH + 4
        self.cache = KVCache(model.cfg, num_pages, dtype=model.dtype, layout=layout, mtp=True)
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
            torch.tensor([self.rng.randrange(60) if at is None else self.ids[at[0]][at[1] + ahead] for at in where])
            for ahead in (0, 1)
        )
        hidden_TD = self.model(ids_T, view)
        drafted_TD, _ = self.model.draft(next_T, hidden_TD, view)
        logits = [self.model.head(x) for x in (hidden_TD, drafted_TD)]
        self.rows.add(where, hidden_TD, drafted_TD, *logits)

    def _view(self, where: list[tuple[int, int] | None]) -> StepView:
        rng, cache = self.rng, self.cache
        width = PAGES_EACH + rng.randrange(3)
        order = rng.sample(range(NUM_SEQS), NUM_SEQS)  # which row of the table is whose
        tables = [self.pages[seq] + [rng.randrange(cache.num_pages) for _ in range(width)] for seq in order]
        table_BN = torch.tensor(tables, dtype=torch.int32)[:, :width]
        live = [at is not None for at in where]
        groups = [order.index(at[0]) if at else 0 for at in where]
        positions = [at[1] if at else rng.randrange(9) for at in where]
        places = [
            self.pages[at[0]][at[1] // 64] * 64 + at[1] % 64 if at else cache.dump_page * 64 + rng.randrange(64)
            for at in where
        ]
        return StepView(
            cache=cache,
            table_BN=table_BN,
            positions_T=torch.tensor(positions),
            group_T=torch.tensor(groups, dtype=torch.int32),
            end_T=torch.tensor([p + 1 if ok else 0 for p, ok in zip(positions, live, strict=True)], dtype=torch.int32),
            place_T=torch.tensor(places),
            max_end=width * 64,
            invariant=self.invariant,
        )


def in_turn(
    model: Glm5,
    ids: list[list[int]],
    rng: random.Random,
    *,
    invariant: bool = True,
    whole: bool = True,
    layout: Layout = "auto",
) -> Rows:
    """Each sequence by itself, one pass after the other; with `whole`, all of them are of PASS_ROWS rows."""
    world = World(model, ids, rng, invariant=invariant, layout=layout)
    for seq, own in enumerate(ids):
        for first in range(0, len(own) - 1, PASS_ROWS):
            count = min(PASS_ROWS, len(own) - 1 - first)
            world.compute([(seq, count)], PASS_ROWS if whole else count)
    return world.rows


def mixed(
    model: Glm5,
    ids: list[list[int]],
    rng: random.Random,
    *,
    invariant: bool = True,
    whole: bool = True,
    layout: Layout = "auto",
) -> Rows:
    """Random chunks of random sequences in each pass, often of one row."""
    world = World(model, ids, rng, invariant=invariant, layout=layout)
    while left := [seq for seq, own in enumerate(ids) if world.done[seq] < len(own) - 1]:
        room, chunks = rng.randint(1, PASS_ROWS), []
        for seq in rng.sample(left, rng.randint(1, len(left))):
            most = min(room, len(ids[seq]) - 1 - world.done[seq])
            if most:
                chunks.append((seq, rng.choice([1, rng.randint(1, most)])))
                room -= chunks[-1][1]
        world.compute(chunks, PASS_ROWS if whole else sum(count for _, count in chunks))
    return world.rows


def make_ids(cfg, rng: random.Random) -> list[list[int]]:
    lengths = [rng.randint(2, 150) for _ in range(NUM_SEQS)]
    return [[rng.randrange(cfg.vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_is_the_same_in_any_pass(name, dtype, seed, rng):
    model = random_model(seed, CONFIGS[name], dtype)
    use_invariant(model)
    ids = make_ids(model.cfg, rng)
    want = in_turn(model, ids, rng)
    for _ in range(2):
        assert mixed(model, ids, rng).num_unlike(want) == 0


@pytest.mark.parametrize("layout", ["fp8_key", "fp8"])
def test_a_row_is_the_same_over_fp8(layout, seed, rng):
    model = random_model(seed, CONFIGS["odd widths"])
    use_invariant(model)
    ids = make_ids(model.cfg, rng)
    want = in_turn(model, ids, rng, layout=layout)
    assert mixed(model, ids, rng, layout=layout).num_unlike(want) == 0
    assert in_turn(model, ids, rng).num_unlike(want) > 0  # the control: another layout, other rows


@pytest.mark.slow  # where threads have no core each, minutes
@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_row_is_the_same_where_threads_share_an_operation(num_threads, seed, rng):
    """At one number of threads: with another, MKL divides some products otherwise."""
    cfg = CONFIGS["odd widths"].replace(hidden_size=260, moe_intermediate_size=132, intermediate_size=1100)
    model = random_model(seed, cfg)
    use_invariant(model)
    ids = make_ids(cfg, rng)
    torch.set_num_threads(num_threads)
    try:
        assert mixed(model, ids, rng).num_unlike(in_turn(model, ids, rng)) == 0
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("left_out", ["passes", "model", "view"])
def test_without_any_part_rows_differ(left_out, seed, rng):
    """The control: passes of other sizes, the model's usual implementations, the view's usual ones (which attend to all
    keys at once where a selection would take them all)."""
    model = random_model(seed, CONFIGS["odd widths"].replace(index_topk=1024))
    if left_out != "model":
        use_invariant(model)
    ids = make_ids(model.cfg, rng)
    how = {"invariant": left_out != "view", "whole": left_out != "passes"}
    want = in_turn(model, ids, rng, **how)
    num_unlike = mixed(model, ids, rng, **how).num_unlike(want)
    print(f"without {left_out}: {num_unlike} of {len(want.found)} rows differ")
    assert num_unlike > 0


def test_widths_that_rows_cannot_begin_aligned_with_are_refused():
    model = random_model(0, preset("tiny").replace(q_lora_rank=30, v_head_dim=18))
    with pytest.raises(ConfigError, match=r"multiples of 4, this model has q_lora_rank 30, v_head_dim 18; run without"):
        use_invariant(model)
