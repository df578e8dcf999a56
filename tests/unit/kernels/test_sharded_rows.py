"""Rows dealt out to ranks and gathered again, by several processes under Triton's interpreter (more in tests/gpu)."""

import pytest
import torch

from glm5.kernels.add_rms_norm import add_rms_norm
from glm5.kernels.all_reduce import all_reduce_reference
from glm5.kernels.block_scaled import FP8, quantize_blocks
from glm5.kernels.fp8_linear.pending import PendingLinear
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.parallel.cuda import CudaGroup
from glm5.parallel.table import Shard
from glm5.testing.numerics import rel_rms
from tests.support.interpreter import interpreted
from tests.support.sharded import run_ranks

ROWS, WIDTH, NUM_WORDS = 6, 136, 8192
SENT = 16  # rows of a product for each rank
EPS = 1e-5
DTYPE, ROUNDING = torch.float16, 5e-4
E4M3 = 0.04  # three bits behind the point: 2.6 % measured


def _parts(ranks, call):
    gen = torch.Generator().manual_seed(call)
    parts = torch.randn(ranks, ROWS, WIDTH, generator=gen).to(DTYPE)
    parts[:, 0, :3] = torch.tensor([0.0, -0.0, -0.0], dtype=DTYPE)
    return parts, torch.randn(ROWS, WIDTH, generator=gen).to(DTYPE), torch.randn(WIDTH, generator=gen).to(DTYPE)


def _expert_outputs(ranks, call, has_shared):
    """Of three choices, and for each rank's token the shared expert's."""
    gen = torch.Generator().manual_seed(100 + call)
    y = torch.randn(ranks, ROWS * 3 + ROWS, WIDTH, generator=gen).to(DTYPE)
    y[:, :3] = -0.0
    return [ExpertOutputs(each, ROWS, 3, has_shared) for each in y]


def _sum_of(outputs):
    """As `ExpertOutputs.summed`, whose kernel adds in the same order."""
    total = torch.zeros(outputs.shape, dtype=torch.float32)
    chosen = outputs.y[: 3 * ROWS].view(ROWS, 3, WIDTH)
    for a in range(3):
        total += chosen[:, a].float()
    return (total + outputs.y[3 * ROWS :].float() if outputs.has_shared else total).to(DTYPE)


def _beside(ranks, call):
    """[ranks, O, 2000]: of two ranks 6,000 words each, which are several pieces, the last of which is not whole."""
    shape = ranks, ROWS // ranks, 2000
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(call)).int()


def _of_each_value(scale):
    """[ROWS, WIDTH], of scales of 128 values or of a row."""
    return scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(128, dim=1)[:, :WIDTH]


def _sends(memory):
    """Stands in for rows.cu (tested in test_fp8_linear_cuda.py), of products of float16."""

    def fp8_linear(x_TD, weight, quantized, *, to):
        y = PendingLinear(x_TD, weight, quantized).computed()
        shares = y.unflatten(0, (len(memory), -1))
        from glm5.kernels.all_reduce.triton_buffers import NUM_BUFFERS

        slot = int(to.slot_index[0])
        for owner, each in enumerate(memory):
            if owner != to.rank:
                place = each.view(NUM_BUFFERS, -1)[slot].view(DTYPE)[to.rank * shares[0].numel() :]
                place[: shares[0].numel()] = shares[owner].flatten() + 0.0
        kept = torch.full_like(shares, torch.nan)
        kept[to.rank] = shares[to.rank]
        return kept.flatten(0, 1)

    return fp8_linear


def _product(rank, ranks, call):
    """Of a rank's columns of weights."""
    gen = torch.Generator().manual_seed(1000 * call + rank)
    x, weight = torch.randn(SENT * ranks, 128, generator=gen).to(DTYPE), torch.randn(WIDTH, 128, generator=gen)
    return PendingLinear(x, quantize_blocks(weight), None)


def work(rank, _port, ranks, folder, calls):
    """What one rank gets in several calls, of parts that fit at once and that do not, between calls of other kinds."""
    from glm5.kernels.all_reduce import triton_sharded
    from glm5.kernels.all_reduce.triton import one_shot, two_shot
    from glm5.kernels.all_reduce.triton_buffers import NUM_BUFFERS, Buffers, empty_state
    from glm5.kernels.all_reduce.triton_sharded import add_rms_norm_sharded as run
    from glm5.kernels.all_reduce.triton_sharded import gather

    memory = [
        torch.from_file(str(folder / str(r)), shared=True, size=NUM_BUFFERS * NUM_WORDS, dtype=torch.int32)
        for r in range(ranks)
    ]
    pointers = torch.tensor([each.data_ptr() for each in memory])
    buffers = Buffers(pointers, empty_state(torch.device("cpu")), rank, ranks, NUM_WORDS, 1)
    group = object.__new__(CudaGroup)  # as on GPUs, but for where its memory lies
    group.shard, group.device, group.buffers = Shard(rank, ranks), torch.device("cpu"), buffers
    share, got = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks), []
    for call in range(calls):
        parts, residual, weight = _parts(ranks, call)
        quantized = torch.zeros(ROWS // ranks, WIDTH, dtype=FP8), torch.zeros(2, ROWS // ranks).T
        norm = residual[share], weight, EPS
        both = run(buffers, parts[rank], norm, quantized if call % 2 else None, max_rows=ranks if call == 2 else None)
        outputs, max_rows = _expert_outputs(ranks, call, call != 1), ranks if call == 1 else None
        of_outputs = run(buffers, outputs[rank], norm, max_rows=max_rows)
        of_sums = run(buffers, _sum_of(outputs[rank]), norm, max_rows=max_rows)
        assert all(torch.equal(*pair) for pair in zip(of_outputs, of_sums, strict=True)), "added up on their way"
        order = torch.randperm(3 * ROWS, generator=torch.Generator().manual_seed(call))
        moved = ExpertOutputs(outputs[rank].y.clone(), ROWS, 3, outputs[rank].has_shared, order.argsort().int())
        moved.y[: 3 * ROWS] = outputs[rank].y[order]
        of_moved = run(buffers, moved, norm, max_rows=max_rows)
        assert all(torch.equal(*pair) for pair in zip(of_moved, of_sums, strict=True)), "in another order"
        of_all = [two_shot(buffers, part, programs=1)[0] for part in (_sum_of(outputs[rank]), outputs[rank], moved)]
        assert all(torch.equal(each, of_all[0]) for each in of_all[1:]), "in two shots"
        for kind in (None, "blocks", "int8"):
            requested = residual, weight, EPS
            ways = [group.add_rms_norm(part, *requested, quantize=kind) for part in (_sum_of(outputs[rank]), moved)]
            assert all(torch.equal(*pair) for pair in zip(ways[0][:2], ways[1][:2], strict=True)), "all rows"
            assert all((way[2] is None) == (kind is None) for way in ways)
            if kind is not None:
                data, scale = ways[1][2]
                assert all(torch.equal(a.float(), b.float()) for a, b in zip(ways[0][2], ways[1][2], strict=True))
                wide = data.double() * _of_each_value(scale.double())
                assert rel_rms(wide, ways[1][0].double()) < E4M3
        assert torch.equal(group.all_gather(parts[rank]), parts)
        wrong = ExpertOutputs(outputs[rank].y.roll(1, 0), ROWS, 3, outputs[rank].has_shared)
        assert not torch.equal(run(buffers, wrong, norm)[1], of_sums[1])
        for _ in range(call):
            assert torch.equal(two_shot(buffers, parts[rank], programs=1)[0], all_reduce_reference(parts))
        few = one_shot(buffers, parts[rank][:1], splits=1)[0]
        assert torch.equal(few, all_reduce_reference(parts[:, :1]))
        product, rows = _product(rank, ranks, call), residual.repeat(SENT, 1)[:SENT]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_sharded, "_MIN_SENT_BYTES", 0)
            apart = run(buffers, product, (rows, weight, EPS))
            patch.setattr(triton_sharded.cuda_rows, "refusal", lambda *given: "")
            patch.setattr(triton_sharded.cuda_rows, "fp8_linear", _sends(memory))
            on_its_way = run(buffers, product, (rows, weight, EPS))
        assert all(torch.equal(*pair) for pair in zip(on_its_way, apart, strict=True)), "sent by who computes"
        beside = _beside(ranks, call)[rank]
        together = group.gather_rows(beside[:, 0], both[0], beside, beside.T.contiguous().T, quantized[0])
        together[-1] = together[-1].float()
        alone = [gather(buffers, part)[0] for part in (both[0], parts[rank].double(), beside.T.contiguous().T)]
        got.append((*both, quantized[0].float(), quantized[1], alone, together))
    gather(buffers, parts[rank][0])
    assert int((memory[rank] != memory[rank][0]).sum()) == 0, "not emptied"
    return got


@interpreted
# More calls than there are buffers; with three ranks, each kind behind each other one.
@pytest.mark.parametrize(("ranks", "calls"), [(2, 3), pytest.param(3, 5, marks=pytest.mark.long)])
def test_shares_are_those_of_the_whole(tmp_path, ranks, calls):
    from glm5.kernels.all_reduce.triton_buffers import NUM_BUFFERS, empty

    for rank in range(ranks):
        empty(torch.from_file(str(tmp_path / str(rank)), shared=True, size=NUM_BUFFERS * NUM_WORDS, dtype=torch.int32))
    shares = run_ranks(ranks, work, ranks, tmp_path, calls)
    for call in range(calls):
        parts, residual, weight = _parts(ranks, call)
        want, total = add_rms_norm(all_reduce_reference(parts), residual, weight, EPS, impl="reference")
        assert torch.equal(torch.cat([got[call][1] for got in shares]), total)
        out = torch.cat([got[call][0] for got in shares])
        assert rel_rms(out, want.double()) < ROUNDING
        for got in shares:
            beside, codes = _beside(ranks, call).flatten(0, 1), torch.cat([got[call][2] for got in shares])
            rows, doubles, turned = got[call][4]
            assert torch.equal(rows, out)
            assert torch.equal(doubles, parts.double().flatten(0, 1))
            assert torch.equal(turned, beside)
            assert turned.stride() == (1, ROWS)
            ones, rows, whole, turned, quantized = got[call][5]
            assert torch.equal(ones, beside[:, 0])
            assert torch.equal(rows, out)
            assert all(torch.equal(each, beside) for each in (whole, turned))
            assert (whole.stride(), turned.stride()) == ((2000, 1), (1, ROWS))
            assert torch.equal(quantized, codes)
        if call % 2:
            data, scale = (torch.cat([got[call][which] for got in shares]) for which in (2, 3))
            wide = data.double() * scale.double().repeat_interleave(128, dim=1)[:, :WIDTH]
            assert rel_rms(wide, out.double()) < E4M3
