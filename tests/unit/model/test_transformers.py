"""Logits equal those of transformers, in every way that a sequence can be fed to the model."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache
from glm5.model.packed import PackedView
from tests.support.cached import view_of
from tests.support.parity import BASE, BUDGET, MIN_GAP, Pair, build_pair

NUM_SEQUENCES = 5


@dataclass(frozen=True)
class Case:
    """Keys of the config that differ from BASE, and how transformers must be told where it reads them wrongly."""

    changes: dict[str, Any] = field(default_factory=dict)
    max_len: int = 48
    reference_changes: dict[str, Any] | None = None


def heads(count: int) -> dict[str, int]:
    return {"num_attention_heads": count, "num_key_value_heads": count}


CASES = {
    "base": Case(),
    "shorter than index_topk": Case(max_len=16),
    "three dense layers": Case({"first_k_dense_replace": 3, "num_hidden_layers": 5}),
    "all dense": Case({"first_k_dense_replace": 4}),
    "odd head counts": Case({**heads(3), "index_n_heads": 17}),
    "one head, many experts": Case({**heads(1), "n_routed_experts": 24, "num_experts_per_tok": 4}),
    "unequal widths": Case({"qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 40, "kv_lora_rank": 24}),
    "top-1": Case({"num_experts_per_tok": 1}),
    "top-3": Case({"num_experts_per_tok": 3, "n_shared_experts": 2}),
    "top-4, weights not normed": Case(
        {"num_experts_per_tok": 4, "norm_topk_prob": False, "routed_scaling_factor": 1.5}
    ),
    "expert groups": Case({"n_group": 4, "topk_group": 2}),
    "shared by indexer_types": Case({"indexer_types": ["full", "shared", "shared", "full"]}),
    "shared by pattern string": Case({"index_topk_pattern": "FSFS"}),
    "shared by pattern list": Case({"index_topk_pattern": ["F", "S", "S", "F"]}, 48, {"index_topk_pattern": "FSSF"}),
    "shared by freq and offset": Case({"index_topk_freq": 3, "index_skip_topk_offset": 2, "num_hidden_layers": 6}),
    "long, theta 8e6": Case(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}, "index_topk": 24, "num_hidden_layers": 2}, 200
    ),
}


def feed_whole(pair: Pair, ids: list[int]) -> Tensor:
    return pair.ours.logits(ids)


def feed_in_steps(pair: Pair, ids: list[int], steps: list[int]) -> Tensor:
    """Cached: `steps` new tokens in each forward pass, over pages handed out out of order."""
    num_pages = -(-len(ids) // PAGE_SIZE)
    cache = KVCache(pair.ours.cfg, num_pages + 3, dtype=torch.float32, mtp=False)
    pages = random.Random(0).sample(range(cache.num_pages), num_pages)
    logits, done = [], 0
    for num_new in steps:
        view = view_of(cache, [(pages, done, done + num_new)])
        logits.append(pair.ours.head(pair.ours(torch.tensor(ids[done : done + num_new]), view)))
        done += num_new
    return torch.cat(logits)


def feed_in_chunks(pair: Pair, ids: list[int]) -> Tensor:
    size = 7
    return feed_in_steps(pair, ids, [size] * (len(ids) // size) + [len(ids) % size] * (len(ids) % size > 0))


def feed_by_token(pair: Pair, ids: list[int]) -> Tensor:
    return feed_in_steps(pair, ids, [1] * len(ids))


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request) -> tuple[Pair, list[list[int]]]:
    case = CASES[request.param]
    seed = list(CASES).index(request.param)
    print(f"seed {seed}")
    rng = random.Random(seed)
    lengths = [
        case.max_len,
        *(rng.randrange(max(2, case.max_len // 2), case.max_len) for _ in range(NUM_SEQUENCES - 1)),
    ]
    ids = [[rng.randrange(2, BASE["vocab_size"]) for _ in range(n)] for n in lengths]
    return build_pair(case.changes, seed, case.reference_changes), ids


def differences(pair: Pair, sequences: list[list[int]], feed) -> list[float]:
    """Largest difference per sequence whose choices cannot flip; the others are compared with choices forced."""
    found = []
    for ids in sequences:
        want, choices = pair.witness(ids)
        got = feed(pair, ids) if pair.smallest_gap(ids) >= MIN_GAP else pair.forced(ids, choices)
        found.append((got - want).abs().max().item())
    return found


@pytest.mark.parametrize("feed", [feed_whole, feed_in_chunks, feed_by_token])
@torch.no_grad()
def test_logits_equal_transformers(case, feed):
    pair, sequences = case
    few = sequences[:3] if feed is feed_by_token else sequences
    assert max(differences(pair, few, feed)) < BUDGET


@torch.no_grad()
def test_batch_of_different_lengths(case):
    pair, sequences = case
    lengths = [len(ids) for ids in sequences]
    ids_T = torch.tensor([token for ids in sequences for token in ids])
    packed = pair.ours.head(pair.ours(ids_T, PackedView(lengths))).split(lengths)
    batched = {tuple(ids): logits for ids, logits in zip(sequences, packed, strict=True)}
    assert max(differences(pair, sequences, lambda _, ids: batched[tuple(ids)])) < BUDGET


@torch.no_grad()
def test_nine_in_ten_sequences_need_no_forcing(capsys):
    """How many sequences of all cases have no row within MIN_GAP of another choice."""
    clear = total = 0
    for number, case in enumerate(CASES.values()):
        pair = build_pair(case.changes, number, case.reference_changes)
        rng = random.Random(number)
        for _ in range(2 * NUM_SEQUENCES):
            ids = [rng.randrange(2, BASE["vocab_size"]) for _ in range(case.max_len)]
            clear += pair.smallest_gap(ids) >= MIN_GAP
            total += 1
    with capsys.disabled():
        print(f"\n{clear} of {total} sequences over {len(CASES)} configurations compared without forcing a choice")
    assert clear >= 0.9 * total


def test_equal_batch_as_nested_list_and_tensor():
    pair = build_pair({}, 0)
    rows = [[3, 4, 5], [6, 7, 8]]
    logits = pair.ours.logits(rows)
    assert logits.shape == (2, 3, BASE["vocab_size"])
    assert torch.equal(logits, pair.ours.logits(torch.tensor(rows)))
    assert torch.allclose(logits[1], pair.ours.logits(rows[1]), atol=1e-5)
