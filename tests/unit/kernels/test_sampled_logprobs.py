"""sampled_logprobs: values, gradients and peak memory of the chunked form against the definition, and that against a
categorical distribution of torch."""

import numpy as np
import pytest
import torch

from glm5.kernels.sampled_logprobs import bits_of, kept_ids, sampled_logprobs
from glm5.kernels.token_logprobs import token_logprobs
from glm5.testing.numerics import rel_rms
from tests.support.masks import kept_of, recorded_mask
from tests.support.peak import peak_bytes

T, D, W = 13, 6, 11
# Inputs are rounded before both runs. Measured: float64 9e-16, float32 5e-7; bfloat16 rounds logits and dlogits: 6e-3.
BUDGET = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 2e-2}


def case(gen, dtype=torch.float64):
    hidden = torch.randn(T, D, generator=gen, dtype=torch.float64).to(dtype)
    weight = torch.randn(W, D, generator=gen, dtype=torch.float64).to(dtype)
    target = torch.randint(W, (T,), generator=gen)
    temperature = torch.rand(T, generator=gen) + 0.3
    temperature[4] = 0.0
    rows = [sorted({int(one), *torch.randperm(W, generator=gen)[:3].tolist()}) for one in target]
    rows[2] = []  # all of the vocabulary
    masks = [recorded_mask(row, W) if row else b"" for row in rows]  # as bits, which are a word
    masks[3] = np.array(rows[3], "<i4").tobytes()
    return hidden, weight, target, temperature, kept_of(masks)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 1000])
def test_a_mask_is_recorded_in_the_fewer_words(vocab, gen):
    """Every count of token ids up to all of them; the last bit of a word, and words of ones, which are -1, too."""
    for count in {1, 2, *range(1, vocab, 7), -(-vocab // 32), -(-vocab // 32) + 1, vocab} - {
        n for n in (2,) if n > vocab
    }:
        count = min(count, vocab)
        ids = sorted(torch.randperm(vocab, generator=gen)[:count].tolist())
        mask = recorded_mask(ids, vocab)
        assert kept_ids(mask).tolist() == ids
        assert len(mask) == 4 * min(count, 1 + -(-vocab // 32))
        rows = kept_of([mask, b"", mask])
        want = torch.ones(vocab, dtype=torch.bool).index_fill(0, torch.tensor(ids), value=False)
        for kept in (rows, rows.take(torch.tensor([2, 1, 0])), rows.rows(0, 3)):
            assert torch.equal(kept.dropped(vocab), torch.stack([want, torch.zeros_like(want), want]))
    assert bits_of(torch.ones(2, 33, dtype=torch.bool)).tolist() == [[-1, 1], [-1, 1]]


@pytest.mark.parametrize("restricted", [False, True])
def test_the_definition_is_that_of_a_categorical_distribution(restricted, gen):
    hidden, weight, target, temperature, kept = case(gen)
    logprob, entropy = sampled_logprobs(
        hidden, weight, target, temperature, kept if restricted else None, impl="reference"
    )
    for t in range(T):
        ids = torch.arange(W)
        if restricted:
            ids = ids[~kept.take(torch.tensor([t])).dropped(W)[0]]
        logits = (weight @ hidden[t])[ids] / (temperature[t].double() or 1.0)
        want = torch.distributions.Categorical(logits=logits)
        assert logprob[t].item() == pytest.approx(want.log_prob((ids == target[t]).nonzero()[0, 0]).item(), rel=1e-12)
        assert entropy[t].item() == pytest.approx(want.entropy().item(), rel=1e-12)


@pytest.mark.parametrize("chunk", [5, 100])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("dtype", BUDGET, ids=str)
def test_agrees_with_float64(dtype, restricted, chunk, gen):
    *inputs, target, temperature, kept = case(gen, dtype)
    grads = torch.randn(2, T, generator=gen)
    sides = []
    for impl, wide in (("chunked", dtype), ("reference", torch.float64)):
        leaves = [one.to(wide).clone().requires_grad_() for one in inputs]
        found = sampled_logprobs(*leaves, target, temperature, kept if restricted else None, chunk=chunk, impl=impl)
        sum((one * grad.to(one.dtype)).sum() for one, grad in zip(found, grads, strict=True)).backward()
        sides.append([*found, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*sides, strict=True):
        assert rel_rms(got, want) < BUDGET[dtype]


def test_budget_notices_a_temperature_that_is_left_out(gen):
    hidden, weight, target, temperature, kept = case(gen)
    want = sampled_logprobs(hidden, weight, target, temperature, kept)
    for got in (
        sampled_logprobs(hidden, weight, target, torch.ones(T), kept),
        sampled_logprobs(hidden, weight, target, temperature),
    ):
        assert all(rel_rms(one, other) > BUDGET[torch.bfloat16] for one, other in zip(got, want, strict=True))


def test_either_output_alone_has_the_same_gradient(gen):
    hidden, weight, target, temperature, kept = case(gen)
    for number in range(2):
        both = []
        for impl in ("chunked", "reference"):
            leaf = hidden.clone().requires_grad_()
            sampled_logprobs(leaf, weight, target, temperature, kept, chunk=4, impl=impl)[number].sum().backward()
            both.append(leaf.grad)
        assert rel_rms(*both) < BUDGET[torch.float64]


def test_at_temperature_one_it_has_the_bits_of_token_logprobs(gen):
    hidden, weight, target, _, _ = case(gen, torch.float32)
    got, _ = sampled_logprobs(hidden, weight, target, torch.ones(T), chunk=4)
    assert torch.equal(got, token_logprobs(hidden, weight, target, chunk=4))
    empty = sampled_logprobs(hidden[:0], weight, target[:0], torch.ones(0))
    assert [one.shape for one in empty] == [(0,), (0,)]


def test_peak_memory_is_that_of_chunks(gen):
    """Forward and backward hold six times the logits of a chunk at most, and the two gradients; not all logits."""
    num, vocab, chunk = 512, 1000, 32
    hidden = torch.randn(num, D, generator=gen).requires_grad_()
    weight = torch.randn(vocab, D, generator=gen).requires_grad_()
    target = torch.randint(vocab, (num,), generator=gen)

    def peak(impl: str) -> int:
        hidden.grad = weight.grad = None
        with peak_bytes() as peak:
            logprob, entropy = sampled_logprobs(hidden, weight, target, torch.ones(num), chunk=chunk, impl=impl)
            (logprob + entropy).sum().backward()
        return peak.at_most

    logits = 4 * num * vocab
    print(f"chunked {peak('chunked') / logits:.2f}, reference {peak('reference') / logits:.2f} times all logits")
    assert peak("chunked") < 6 * logits * chunk / num + 2 * 4 * D * (num + 2 * vocab)
    assert peak("reference") > 2 * logits
