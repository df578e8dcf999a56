"""token_logprobs: values, gradients and peak memory of the chunked form against the definition."""

import pytest
import torch

from glm5.kernels.token_logprobs import token_logprobs
from glm5.testing.numerics import rel_rms
from tests.support.peak import peak_bytes

T, D, W = 13, 6, 11
# Inputs are rounded before both runs. Measured: float64 9e-16, float32 5e-7; bfloat16 rounds logits and dlogits: 6e-3.
BUDGET = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 2e-2}


def case(gen, dtype=torch.float64, num=T):
    hidden = torch.randn(num, D, generator=gen, dtype=torch.float64).to(dtype)
    weight = torch.randn(W, D, generator=gen, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(W, (num,), generator=gen)


@pytest.mark.parametrize("chunk", [1, 5, T, 100])
@pytest.mark.parametrize("dtype", BUDGET, ids=str)
def test_agrees_with_float64(dtype, chunk, gen):
    hidden, weight, target = case(gen, dtype)
    grad = torch.randn(T, generator=gen)
    sides = []
    for impl, wide in (("chunked", dtype), ("reference", torch.float64)):
        leaves = [one.to(wide).clone().requires_grad_() for one in (hidden, weight)]
        out = token_logprobs(*leaves, target, chunk=chunk, impl=impl)
        out.backward(grad.to(out.dtype))
        sides.append([out, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*sides, strict=True):
        assert rel_rms(got, want) < BUDGET[dtype]


def test_budget_notices_one_wrong_target(gen):
    hidden, weight, target = case(gen)
    want = token_logprobs(hidden, weight, target, impl="reference")
    target[3] = (target[3] + 1) % W
    assert rel_rms(token_logprobs(hidden, weight, target), want) > BUDGET[torch.bfloat16]


def test_forward_has_the_bits_of_the_definition(gen):
    hidden, weight, target = case(gen, torch.float32)
    assert torch.equal(token_logprobs(hidden, weight, target), token_logprobs(hidden, weight, target, impl="reference"))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_gradcheck(impl, gen):
    hidden, weight, target = case(gen)
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda *of: token_logprobs(*of, target, chunk=4, impl=impl), inputs)


def test_a_frozen_side_gets_no_gradient_and_no_tokens_are_allowed(gen):
    hidden, weight, target = case(gen)
    token_logprobs(hidden.requires_grad_(), weight, target).sum().backward()
    assert weight.grad is None
    assert token_logprobs(hidden[:0], weight, target[:0]).shape == (0,)


def test_peak_memory_is_that_of_a_chunk(gen):
    """Forward and backward hold three times the logits of a chunk, and the two gradients; not all logits."""
    num, vocab, chunk = 512, 1000, 32
    hidden = torch.randn(num, D, generator=gen).requires_grad_()
    weight = torch.randn(vocab, D, generator=gen).requires_grad_()
    target = torch.randint(vocab, (num,), generator=gen)

    def peak(impl: str) -> int:
        hidden.grad = weight.grad = None
        with peak_bytes() as peak:
            token_logprobs(hidden, weight, target, chunk=chunk, impl=impl).sum().backward()
        return peak.at_most

    logits = 4 * num * vocab
    assert peak("chunked") < 3 * logits * chunk / num + 2 * 4 * D * (num + 2 * vocab)
    assert peak("reference") > 2 * logits


def test_unknown_impl():
    with pytest.raises(ValueError, match="unknown impl 'fused'"):
        token_logprobs(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), impl="fused")
