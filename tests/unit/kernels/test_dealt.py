"""Rows dealt out to ranks and gathered again, by several processes under Triton's interpreter (more in tests/gpu)."""

import pytest
import torch

from glm5.kernels.add_rms_norm import add_rms_norm
from glm5.kernels.all_reduce import all_reduce_reference
from glm5.kernels.block_scaled import FP8
from glm5.testing.numerics import rel_rms
from tests.support.interpreter import interpreted
from tests.support.sharded import run_ranks

ROWS, WIDTH, RANKS, NUM_WORDS = 6, 136, 2, 512
EPS, CALLS = 1e-5, 5
ROUNDING = {torch.float32: 1e-7, torch.float16: 5e-4}
E4M3 = 0.04  # three bits behind the point: 2.6 % measured


def _parts(dtype, call):
    gen = torch.Generator().manual_seed(call)
    parts = torch.randn(RANKS, ROWS, WIDTH, generator=gen).to(dtype)
    parts[:, 0, :3] = torch.tensor([0.0, -0.0, -0.0], dtype=dtype)
    return parts, torch.randn(ROWS, WIDTH, generator=gen).to(dtype), torch.randn(WIDTH, generator=gen).to(dtype)


def work(rank, _port, folder, dtype):
    """What one rank gets in several calls, more than there are buffers; of parts that fit at once, and that do not."""
    from glm5.kernels.all_reduce.triton_buffers import NUM_BUFFERS, Buffers, empty_state
    from glm5.kernels.all_reduce.triton_dealt import dealt, gather

    memory = [
        torch.from_file(str(folder / str(r)), shared=True, size=NUM_BUFFERS * NUM_WORDS, dtype=torch.int32)
        for r in range(RANKS)
    ]
    pointers = torch.tensor([each.data_ptr() for each in memory])
    buffers = Buffers(pointers, empty_state(torch.device("cpu")), rank, RANKS, NUM_WORDS, 1)
    share, got = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS), []
    for call in range(CALLS):
        parts, residual, weight = _parts(dtype, call)
        quantized = torch.zeros(ROWS // RANKS, WIDTH, dtype=FP8), torch.zeros(2, ROWS // RANKS).T
        norm = residual[share], weight, EPS
        both = dealt(buffers, parts[rank], norm, quantized if call % 2 else None, max_rows=4 if call == 2 else None)
        got.append(
            (*both, quantized[0].float(), quantized[1], gather(buffers, both[0]), gather(buffers, parts[rank].double()))
        )
    assert int((memory[rank] != memory[rank][0]).sum()) == 0, "not emptied"
    return got


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16])
def test_shares_are_those_of_the_whole(tmp_path, dtype):
    from glm5.kernels.all_reduce.triton_buffers import NUM_BUFFERS, empty

    for rank in range(RANKS):
        empty(torch.from_file(str(tmp_path / str(rank)), shared=True, size=NUM_BUFFERS * NUM_WORDS, dtype=torch.int32))
    ranks = run_ranks(RANKS, work, tmp_path, dtype)
    for call in range(CALLS):
        parts, residual, weight = _parts(dtype, call)
        want, total = add_rms_norm(all_reduce_reference(parts), residual, weight, EPS, impl="reference")
        assert torch.equal(torch.cat([got[call][1] for got in ranks]), total)
        out = torch.cat([got[call][0] for got in ranks])
        assert rel_rms(out, want.double()) < ROUNDING[dtype]
        for got in ranks:
            assert torch.equal(got[call][4].flatten(0, 1), out)
            assert torch.equal(got[call][5], parts.double())
        if call % 2:
            data, scale = (torch.cat([got[call][which] for got in ranks]) for which in (2, 3))
            wide = data.double() * scale.double().repeat_interleave(128, dim=1)[:, :WIDTH]
            assert rel_rms(wide, out.double()) < E4M3
