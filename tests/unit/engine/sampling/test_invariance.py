"""A row's token and log-probabilities are its own: bitwise the same in any batch, order, thread count or slot."""

import dataclasses

import numpy as np
import pytest
import torch

from glm5.engine.sampling import Placement, Sampled, Sampler, SamplingParams, accept, draw
from glm5.engine.sampling.noise import log_exponential
from tests.unit.engine.sampling.oracle import rows_of

NUM_SLOTS, DEPTH = 12, 3
# One more than a head that is sorted first, and so many that a part is one row.
VOCABS = [301, 1500, 150_000]


def all_kinds(seed: int, vocab_size: int) -> list[Placement]:
    """Placements that use everything, each for its own slot."""
    rng = np.random.default_rng(seed)
    kinds = [
        {"temperature": 0.0, "logprobs": 3},
        {},
        {"top_k": 9, "temperature": 0.7},
        {"top_p": 0.7, "logprobs": 0, "temperature": 1.3},
        {"min_p": 0.1},
        {"temperature": 3.0, "top_p": 0.999},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 5},
        {"frequency_penalty": -0.5, "temperature": 0.0},
        {"logit_bias": {5: 3, 7: -100}, "min_tokens": 50},
        {"bad_words": ["x"], "top_k": 300, "top_p": 0.95},
        {"allowed_token_ids": list(range(0, 300, 3)), "logprobs": 2, "temperature": 0.5},
        {"min_tokens": 3, "top_p": 0.5, "top_k": 50, "min_p": 0.01, "frequency_penalty": 0.1},
    ]
    tokens = [rng.integers(0, vocab_size, 20).tolist() for _ in kinds]
    return [
        Placement(
            slot, SamplingParams(max_tokens=None, **kind), int(rng.integers(2**63)), ids[:10], ids[10:], (1, 2),
            [[*ids[-2:], 5], (9,)] if "bad_words" in kind else (),
        )
        for slot, (kind, ids) in enumerate(zip(kinds, tokens, strict=True))
    ]  # fmt: skip


def flat(sampled: Sampled, row: int, num_logprobs: int | None) -> list[float]:
    """Everything about one row, for exact comparison; log-probabilities as far as the row asked for them."""
    values = [sampled.token_T[row].item(), sampled.no_valid_token_T[row].item()]
    if num_logprobs is not None:
        assert sampled.logprobs is not None
        for tensor in dataclasses.astuple(sampled.logprobs):
            values += tensor[row][:num_logprobs].tolist() if tensor.dim() == 2 else [tensor[row].item()]
    return values


def compare_with_lone_rows(vocab_size: int, seed: int, scale: float) -> None:
    placements = all_kinds(seed, vocab_size)
    gen = torch.Generator().manual_seed(seed)
    slots = [slot for slot in range(NUM_SLOTS) for _ in range(DEPTH + 1)]
    offsets = list(range(DEPTH + 1)) * NUM_SLOTS
    positions = [20 + offset for offset in offsets]
    logits = torch.randn(len(slots), vocab_size, generator=gen) * scale
    drafts = torch.randint(0, vocab_size, (NUM_SLOTS + 1, DEPTH), generator=gen)
    together = Sampler(NUM_SLOTS, vocab_size, max_drafts=DEPTH)
    together.place(placements)
    whole = together.sample(logits, rows_of(slots, positions, offsets), drafts)
    order = torch.randperm(len(slots), generator=gen).tolist()
    shuffled = together.sample(
        logits[order], rows_of(*([x[r] for r in order] for x in (slots, positions, offsets))), drafts
    )
    for place, row in enumerate(order):
        slot, params = slots[row], placements[slots[row]].params
        want = flat(whole, row, params.logprobs)
        assert flat(shuffled, place, params.logprobs) == want
        if row % 3 == 0:
            alone = Sampler(1, vocab_size, max_drafts=DEPTH)
            alone.place([dataclasses.replace(placements[slot], slot=0)])
            one = alone.sample(
                logits[row : row + 1], rows_of([0], [positions[row]], [offsets[row]]), drafts[slot].expand(2, -1)
            )
            assert flat(one, 0, params.logprobs) == want


@pytest.mark.parametrize("scale", [0.5, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("vocab_size", VOCABS[:2])
def test_rows_do_not_see_their_batch(vocab_size, scale, seed):
    compare_with_lone_rows(vocab_size, seed, scale)


def test_rows_of_a_wide_vocabulary_do_not_see_their_batch(seed):
    compare_with_lone_rows(VOCABS[2], seed, 4.0)


def test_rows_do_not_see_the_number_of_threads(seed):
    logits = torch.randn(3, 40_000, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler(12, 40_000)
    sampler.place(all_kinds(seed, 40_000))
    rows = rows_of([3, 6, 11], [20, 20, 20])
    one = sampler.sample(logits, rows)
    torch.set_num_threads(2)
    try:
        two = sampler.sample(logits, rows)
    finally:
        torch.set_num_threads(1)
    assert [flat(one, row, 5) for row in range(3)] == [flat(two, row, 5) for row in range(3)]


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 31, 33, 1000, 4099])
def test_noise_of_a_row_is_the_same_in_any_shape(vocab_size, seed):
    """Also of the last tokens, where vector instructions run out."""
    seeds, positions = torch.arange(seed, seed + 5), torch.arange(5)
    whole = log_exponential(seeds, positions, 5000)
    for row in range(5):
        part = log_exponential(seeds[row : row + 1], positions[row : row + 1], vocab_size)
        assert torch.equal(part[0], whole[row, :vocab_size])


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "equal", "barred"])
def test_sorting_a_head_or_all_is_the_same(kind, seed, monkeypatch):
    vocab_size, num_rows = 900, 60
    gen = torch.Generator().manual_seed(seed)
    scale = {"flat": 0.3, "peaked": 6.0}.get(kind, 2.0)
    logits = torch.randn(num_rows, vocab_size, generator=gen) * scale
    if kind == "ties":
        logits = logits.round()
    if kind == "equal":
        logits.zero_()
    if kind == "barred":
        logits[:, 40:] = -torch.inf
    cases = [{"top_k": 3}, {"top_k": 64}, {"top_k": 65}, {"top_k": 899}, {"top_k": 5000}, {"top_p": 0.1}]
    cases += [{"top_p": 0.9}, {"top_p": 0.9999}, {"top_p": 0.5, "top_k": 20}, {"top_p": 0.9, "top_k": 500}, {}]
    cases.append({"min_p": 0.05, "top_p": 0.9})
    sampler = Sampler(num_rows, vocab_size)
    sampler.place([Placement(i, SamplingParams(**cases[i % len(cases)]), seed + i, [1], [2]) for i in range(num_rows)])
    rows = rows_of(range(num_rows), [2] * num_rows)
    tokens = []
    for head in (64, 899, 1024):
        monkeypatch.setattr(draw, "_HEAD", head)
        tokens.append(sampler.sample(logits, rows).token_T.tolist())
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("next_ones", ["plain", "others"])
def test_a_slot_keeps_nothing_of_its_last_sequence(next_ones, seed):
    """New sequences after ones that used everything; at first beside half of those, then among themselves."""
    vocab_size = 301
    first, second = all_kinds(seed, vocab_size), all_kinds(seed + 1, vocab_size)
    turned = [dataclasses.replace(second[slot - 1], slot=slot) for slot in range(NUM_SLOTS)]
    if next_ones == "plain":
        turned = [Placement(slot, SamplingParams(logprobs=1), 5 + slot, [7, 8]) for slot in range(NUM_SLOTS)]
    used, fresh = Sampler(NUM_SLOTS, vocab_size), Sampler(NUM_SLOTS, vocab_size)
    used.place(first)
    logits = torch.randn(NUM_SLOTS, vocab_size, generator=torch.Generator().manual_seed(seed))
    rows = rows_of(range(NUM_SLOTS), [20] * NUM_SLOTS)
    used.permit([10], torch.zeros(1, 1, 10, dtype=torch.int32))
    for _ in range(3):
        sampled = used.sample(logits, rows)
        used.record(accept(sampled.token_T, rows.slot_T, rows.offset_T, no_drafts()), rows.slots)
    for half in (0, 1):
        used.place(turned[half::2])
        fresh.place(turned[half::2])
        ours, theirs = used.sample(logits, rows), fresh.sample(logits, rows)
        for slot in range(half, NUM_SLOTS, 2):
            shown = turned[slot].params.logprobs
            assert flat(ours, slot, shown) == flat(theirs, slot, shown)


def no_drafts() -> torch.Tensor:
    return torch.zeros(NUM_SLOTS + 1, 0, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [320, 512, 4096, 154_880])
def test_rows_do_not_see_how_many_they_are(vocab_size, dtype, seed):
    """From 1 to 70 rows of any sequences, against each row alone."""
    most, counts = (70, [2, 3, 7, 16, 33, 64, 70]) if vocab_size < 5000 else (12, [2, 5, 12])
    kinds = all_kinds(seed, vocab_size)
    placements = [dataclasses.replace(kinds[slot % NUM_SLOTS], slot=slot, seed=seed + slot) for slot in range(most)]
    sampler = Sampler(most, vocab_size)
    sampler.place(placements)
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(most, vocab_size, generator=gen) * 3).to(dtype)

    def results(slots: list[int]) -> list[list[float]]:
        sampled = sampler.sample(logits[slots], rows_of(slots, [20] * len(slots)))
        return [flat(sampled, row, placements[slot].params.logprobs) for row, slot in enumerate(slots)]

    alone = [results([slot])[0] for slot in range(most)]
    for count in counts:
        slots = torch.randperm(most, generator=gen)[:count].tolist()
        assert results(slots) == [alone[slot] for slot in slots]
