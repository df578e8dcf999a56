"""Packed sequences that begin alike: which tokens are computed, by whom, and that nothing else changes."""

import random

import numpy as np
import pytest
import torch

from glm5.config.presets import preset
from glm5.rl.training import engine_pass
from glm5.rl.training.exact import ExactPass
from glm5.rl.training.prefixes import Prefixes
from tests.support.models import random_model


def alike(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Sequences of two token ids, so that most begin as others do; some are equal, some are others' beginnings."""
    found = [[rng.randrange(2) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    found.append(found[0])
    found.append(found[1][: len(found[1]) // 2 + 1])
    rng.shuffle(found)
    return found


def prefixes_of(sequences: list[list[int]]) -> Prefixes:
    return Prefixes.of(np.concatenate([np.array(ids) for ids in sequences]), [len(ids) for ids in sequences])


def test_each_prefix_belongs_to_the_first_that_has_it(rng):
    for _ in range(50):
        sequences = alike(rng, rng.randint(2, 12), 9)
        found = prefixes_of(sequences)
        ends = [tuple(ids[: end + 1]) for ids in sequences for end in range(len(ids))]
        first = {end: place for place, end in reversed(list(enumerate(ends)))}
        assert sorted(found.place_U.tolist()) == sorted(first.values())
        assert found.place_U[found.number_T].tolist() == [first[end] for end in ends]
        owner = [number for number, ids in enumerate(sequences) for _ in ids]
        num_own = [len(sequences[owner[place]]) - found.shared_B[owner[place]] for place in found.place_U]
        assert num_own == sorted(num_own)
        for number, ids in enumerate(sequences):
            shared = [owner[first[tuple(ids[: end + 1])]] < number for end in range(len(ids))]
            assert found.shared_B[number] == sum(shared) == ([*shared, False]).index(False)
            source = found.source_B[number]
            assert (source < 0) == (not any(shared))
            assert source < number
            assert source < 0 or sequences[source][: sum(shared)] == ids[: sum(shared)]


def test_a_wave_reads_from_earlier_ones(rng):
    for _ in range(50):
        found = prefixes_of(alike(rng, rng.randint(2, 12), 9))
        done: set[int] = {-1}
        for wave in found.waves:
            assert all(found.source_B[number] in done for number in wave)
            done |= set(wave.tolist())
        assert done == {-1, *range(len(found.source_B))}


def test_a_single_sequence_shares_nothing():
    found = prefixes_of([[3, 3, 3]])
    assert (found.place_U.tolist(), found.number_T.tolist(), len(found.waves)) == ([0, 1, 2], [0, 1, 2], 1)


def test_sequences_that_share_nothing_keep_the_order_of_the_batch():
    found = prefixes_of([[1, 2, 3], [4], [5, 6]])
    assert found.place_U.tolist() == found.number_T.tolist() == list(range(6))


@torch.no_grad()
def test_equal_sequences_are_computed_once(seed):
    exact = ExactPass(random_model(seed, preset("nano")), threads=1)
    ids = [3, 1, 4, 1, 5] * 20
    one, two = exact.hidden(torch.tensor(ids + ids), [100, 100]).split(100)
    assert torch.equal(one, two)
    assert torch.equal(one, exact.hidden(torch.tensor(ids), [100]))


@pytest.mark.parametrize("fault", [False, True])
@torch.no_grad()
def test_shared_tokens_have_the_bits_of_their_own(fault, seed, rng, monkeypatch):
    """Of sequences together and alone; the control gives later sequences none of the keys that they share."""
    model = random_model(seed, preset("nano"))
    exact = ExactPass(model, threads=1)
    stem = [rng.randrange(model.cfg.vocab_size) for _ in range(150)]
    own = [rng.randrange(model.cfg.vocab_size) for _ in range(9)]
    sequences = [stem, stem[:140] + own, stem[:64] + own, stem[:3], stem[:140] + own[:5] + own]
    lengths = [len(ids) for ids in sequences]
    prefixes = prefixes_of(sequences)
    assert len(prefixes.place_U) == 150 + 9 + 9 + 9
    alone = torch.cat([exact.hidden(torch.tensor(ids), [len(ids)]) for ids in sequences])
    if fault:
        monkeypatch.setattr(engine_pass, "_share", lambda *_: None)
    together = exact.hidden(torch.tensor([token_id for ids in sequences for token_id in ids]), lengths)
    assert torch.equal(together, alone) == (not fault)
