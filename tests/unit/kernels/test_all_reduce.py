"""Sums over ranks: the reference against float64; the kernels with one rank alone (more in tests/gpu)."""

import pytest
import torch

from glm5.kernels.add_rms_norm import add_rms_norm
from glm5.kernels.all_reduce import all_reduce_reference
from glm5.kernels.block_scaled import FP8
from glm5.kernels.row_codes import empty_codes
from glm5.kernels.token_quant import token_quant
from glm5.testing.numerics import rel_rms
from tests.support.interpreter import DTYPES, interpreted

E4M3 = 0.04  # three bits behind the point: 2.6 % measured
ROUNDING = {torch.float32: 1e-7, torch.float16: 5e-4, torch.bfloat16: 3e-3}
# Between two norms: each rounds the square root and two products, in float32, by half of 2**-23 at the most.
BETWEEN_NORMS = {**ROUNDING, torch.float32: 2 * 3 * 2**-24}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_rounds_once(dtype, seed):
    parts = torch.randn(8, 33, 40, generator=torch.Generator().manual_seed(seed)).to(dtype)
    exact = parts.double().sum(dim=0)
    assert rel_rms(all_reduce_reference(parts), exact) < ROUNDING[dtype]
    if dtype != torch.float32:
        assert torch.equal(all_reduce_reference(parts), parts.float().sum(dim=0).to(dtype))
    assert torch.equal(all_reduce_reference(torch.arange(6).view(3, 2)), torch.tensor([6, 9]))
    parts[3, 0] *= 1.5
    assert rel_rms(all_reduce_reference(parts), exact) > 10 * ROUNDING[dtype]


def buffers(num_words=1 << 15):
    """Of one rank."""
    from glm5.kernels.all_reduce.triton_buffers import NUM_BUFFERS, Buffers, empty, empty_state

    memory = torch.empty(NUM_BUFFERS * num_words, dtype=torch.int32)
    empty(memory)
    pointers = torch.tensor([memory.data_ptr()])
    return memory, Buffers(pointers, empty_state(torch.device("cpu")), 0, 1, num_words, 1)


def _widened(quantized):
    data, scale = quantized
    return data.double() * scale.double().repeat_interleave(128, dim=1)[:, : data.shape[1]]


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_with_one_rank(dtype, seed):
    from glm5.kernels.all_reduce.triton import fits, gather, one_shot, two_shot

    generator = torch.Generator().manual_seed(seed)
    memory, buffer = buffers()
    for num_rows, width in [(1, 136), (1, 1288), (1, 24), (1, 1288)]:
        x, residual = (torch.randn(num_rows, width, generator=generator).to(dtype) for _ in range(2))
        x[0, 1], x[0, 2] = -0.0, 0.0
        weight = torch.randn(width, generator=generator).to(dtype)
        assert fits(buffer, x, num_rows, two_shot=True)
        assert fits(buffer, x, num_rows, two_shot=False)
        want, total = add_rms_norm(x, residual, weight, 1e-5, impl="reference")
        for kernel in (lambda *a: one_shot(*a, splits=1), lambda *a: two_shot(*a, programs=1)):
            assert torch.equal(kernel(buffer, x)[0], x)
            out, added = kernel(buffer, x, (residual, weight, 1e-5))
            assert torch.equal(added, total)
            assert rel_rms(out, want.double()) < BETWEEN_NORMS[dtype]
        assert torch.equal(gather(buffer, weight[:20].double())[0], weight[:20].double())
        assert torch.equal(gather(buffer, torch.tensor([3, 1 << 40]))[0], torch.tensor([3, 1 << 40]))
    x, residual = (torch.randn(3, 136, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(136, generator=generator).to(dtype)
    want, total = add_rms_norm(x, residual, weight, 1e-5, impl="reference")
    again = torch.zeros(1, 136, dtype=FP8), torch.zeros(2, 1).T
    one_shot(buffer, x[:1], (residual[:1], weight, 1e-5), splits=1, quantized=again)
    quantized = torch.zeros(3, 136, dtype=FP8), torch.zeros(2, 3).T
    out, added = two_shot(buffer, x, (residual, weight, 1e-5), programs=1, max_rows=2, quantized=quantized)
    assert torch.equal(added, total)
    assert rel_rms(out, want.double()) < BETWEEN_NORMS[dtype]
    assert rel_rms(_widened(quantized), out.double()) < E4M3
    assert torch.equal(again[1], quantized[1][:1])
    assert torch.equal(again[0].view(torch.uint8), quantized[0][:1].view(torch.uint8))
    tokens = empty_codes(3, 136, "int8", x.device)
    two_shot(buffer, x, (residual, weight, 1e-5), programs=1, max_rows=2, quantized=tokens)
    assert all(torch.equal(own, right) for own, right in zip(tokens, token_quant(out, "int8"), strict=True))

    assert buffer.state[:2].tolist() == [(4 * 6 + 5) % 3, 0]
    assert int((memory != memory[-1]).sum()) > 0  # the last buffer is emptied by the next call
    assert not fits(buffer, torch.empty(40, 1288), 40, two_shot=True)
    assert not fits(buffer, torch.empty(2, 9), 2, two_shot=False)
    assert gather(buffer, torch.empty(1 << 20)) is None


@interpreted
def test_buffers_take_turns_for_ever():
    """A number of calls would not fit into 32 bits after two days."""
    from glm5.kernels.all_reduce.triton import gather, one_shot, two_shot

    _, buffer = buffers()
    x, turns = torch.ones(1, 24, dtype=torch.float16), []
    for way in (one_shot, two_shot, one_shot, two_shot):
        way(buffer, x, **{"splits": 1} if way is one_shot else {"programs": 1})
        turns.append(int(buffer.state[0]))
    gather(buffer, x)
    assert [*turns, int(buffer.state[0])] == [1, 2, 0, 1, 2]
