"""Speculation changes when tokens come, never which: generation with drafts against generation without."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from glm5.engine.sampling import Placement, Sampler, SamplingParams, accept
from glm5.engine.sampling.drafts import accept_on_device
from tests.unit.engine.sampling.oracle import rows_of

VOCAB, LENGTH = 40, 48
KINDS = [
    {"temperature": 0.0},
    {},
    {"top_k": 8, "temperature": 1.5, "logprobs": 2},
    {"top_p": 0.8, "frequency_penalty": 0.8},
    {"repetition_penalty": 1.5, "temperature": 0.0},
    {"presence_penalty": -0.7, "min_p": 0.02},
    {"bad_words": ["x"], "temperature": 2.0},
    {"min_tokens": 30, "logit_bias": {3: 4, 4: 2}},
]
WORDS = (*((a, b) for a in range(12) for b in range(a % 3, 12, 3)), (1, 1, 1), (2,))


def logits_after(token_ids: Sequence[int]) -> torch.Tensor:
    """A model of sorts: peaked logits that depend on the last three tokens."""
    gen = torch.Generator().manual_seed(hash(tuple(token_ids[-3:])) % 2**31)
    return torch.randn(VOCAB, generator=gen) * 2


def accepted_by_hand(tokens: list[int], drafts: list[int]) -> list[int]:
    new = [tokens[0]]
    for token, draft in zip(tokens[1:], drafts, strict=False):
        if new[-1] != draft:
            break
        new.append(token)
    return new


def test_accept_is_the_definition(rng):
    num_slots, depth = 9, 4
    for _ in range(50):
        slots = rng.sample(range(num_slots), rng.randrange(1, num_slots))
        depths = {slot: rng.randrange(depth + 1) for slot in slots}
        drafts_Y = torch.tensor([[rng.randrange(3) for _ in range(depth)] for _ in range(num_slots + 1)])
        where = [(slot, offset) for slot in slots for offset in range(depths[slot] + 1)]
        where += [(num_slots, 0)] * rng.randrange(3)
        rows = rows_of([slot for slot, _ in where], [0] * len(where), [offset for _, offset in where])
        token_T = torch.tensor([rng.randrange(3) for _ in where])
        accepted = accept(token_T, rows.slot_T, rows.offset_T, drafts_Y)
        on_device = accept_on_device(token_T, rows.slot_T, rows.offset_T, drafts_Y)
        assert all(map(torch.equal, accepted, on_device))
        for slot in range(num_slots + 1):
            drawn = [token for token, (owner, _) in zip(token_T.tolist(), where, strict=True) if owner == slot]
            want = accepted_by_hand(drawn, drafts_Y[slot].tolist()) if slot in depths else []
            assert accepted.tokens_Y[slot, : accepted.count_Y[slot]].tolist() == want


class Generation:
    """Sequences that grow in slots of a sampler, several drafts at a time."""

    def __init__(self, depth: int, rng: random.Random, guesses: dict[int, list[int]] | None) -> None:
        self.depth, self.rng, self.guesses = depth, rng, guesses
        self.num_slots = len(KINDS) + 2
        self.sampler = Sampler(self.num_slots, VOCAB, max_drafts=depth)
        self.written: dict[int, list[int]] = {index: [] for index in range(len(KINDS))}
        self.slots: dict[int, int] = {}
        self.num_steps = 0

    def place(self, index: int) -> None:
        """In any free slot, with what was written so far."""
        free = set(range(self.num_slots)) - set(self.slots.values())
        self.slots[index] = slot = self.rng.choice(sorted(free))
        kind = dict(KINDS[index])
        words = WORDS if kind.pop("bad_words", None) else ()
        params = SamplingParams(max_tokens=None, **kind)
        self.sampler.place(
            [Placement(slot, params, 77 + index, self.prompt(index), self.written[index], (3, 4), words)]
        )

    @staticmethod
    def prompt(index: int) -> list[int]:
        return [index, index + 1, 5]

    def drafts(self, index: int) -> list[int]:
        """Half of them right, if the right ones are known."""
        here, count = len(self.written[index]), self.rng.randrange(self.depth + 1)
        known = self.guesses[index][here : here + count] if self.guesses else []
        known += [0] * (count - len(known))
        return [token if self.rng.random() < 0.8 else self.rng.randrange(VOCAB) for token in known]

    def step(self) -> None:
        drafts_Y = torch.full((self.num_slots + 1, self.depth), -1)
        slots, positions, offsets, logits = [], [], [], []
        running = [index for index in self.slots if self.rng.random() < 0.8] or list(self.slots)
        self.rng.shuffle(running)
        for index in running:
            drafts, context = self.drafts(index), self.prompt(index) + self.written[index]
            drafts_Y[self.slots[index], : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
            for offset in range(len(drafts) + 1):
                slots.append(self.slots[index])
                positions.append(len(context) + offset)
                offsets.append(offset)
                logits.append(logits_after(context + drafts[:offset]))
        rows = rows_of(slots, positions, offsets)
        sampled = self.sampler.sample(torch.stack(logits), rows, drafts_Y if self.depth else None)
        accepted = accept(sampled.token_T, rows.slot_T, rows.offset_T, drafts_Y)
        self.sampler.record(accepted, rows.slots)
        for index in running:
            slot = self.slots[index]
            self.written[index] += accepted.tokens_Y[slot, : accepted.count_Y[slot]].tolist()
            if self.rng.random() < 0.05 or len(self.written[index]) >= LENGTH:
                del self.slots[index]  # preempted, or done

    def run(self) -> dict[int, list[int]]:
        while any(len(ids) < LENGTH for ids in self.written.values()):
            for index, ids in self.written.items():
                if index not in self.slots and len(ids) < LENGTH:
                    self.place(index)
            self.step()
            self.num_steps += 1
        return {index: ids[:LENGTH] for index, ids in self.written.items()}


@pytest.fixture(scope="module")
def undrafted() -> dict[int, list[int]]:
    return Generation(0, random.Random(1), None).run()


@pytest.mark.parametrize("depth", [0, 1, 3, 5])
def test_tokens_do_not_depend_on_drafts(depth, undrafted, rng):
    """Nor on the order of rows, on slots, or on preemption."""
    generation = Generation(depth, rng, undrafted)
    assert generation.run() == undrafted
    if depth == 5:
        assert generation.num_steps < LENGTH  # drafts did stand


def test_bad_words_and_stops_are_obeyed(undrafted):
    barred = undrafted[6]
    pairs = set(itertools.pairwise(barred))
    assert not pairs & {word for word in WORDS if len(word) == 2}
    assert 2 not in barred
    assert not {3, 4} & set(undrafted[7][:30])
    assert {3, 4} & set(undrafted[7][30:])


def test_drafts_drawn_by_the_same_noise_stand_more_often(seed):
    """A drafter that samples with the sampler's own noise agrees with the target as often as their noise allows."""
    num_rows = 4000
    gen = torch.Generator().manual_seed(seed)
    target = torch.randn(num_rows, VOCAB, generator=gen) * 2
    close = target + torch.randn(num_rows, VOCAB, generator=gen) * 0.3
    sampler = Sampler(2, VOCAB)
    sampler.place([Placement(slot, SamplingParams(), slot, [1]) for slot in range(2)])
    rows = rows_of([0] * num_rows, range(num_rows))
    other = rows_of([1] * num_rows, range(num_rows))
    tokens = sampler.sample(target, rows).token_T
    same = (sampler.sample(close, rows).token_T == tokens).float().mean().item()
    independent = (sampler.sample(close, other).token_T == tokens).float().mean().item()
    overlap = np.minimum(target.softmax(-1).numpy(), close.softmax(-1).numpy()).sum(axis=1).mean()
    print(f"agreement {same:.3f}, with noise of its own {independent:.3f}, at best {overlap:.3f}")
    assert independent < 0.6 * overlap < 0.9 * overlap < same
