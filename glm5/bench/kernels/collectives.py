"""Sums over the GPUs of this machine, checked and then timed: `python -m glm5.bench.kernels.collectives`.

One process a GPU. Each algorithm is checked against a sum in float64, and for the same bits on every rank and in twenty
repeats. Its time is microseconds of a call in a CUDA graph of many, of the slowest rank.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from glm5.bench.command import command, need_gpus
from glm5.bench.kernels.clock import milliseconds
from glm5.bench.kernels.shapes import ACTIVE
from glm5.bench.ranks import run_ranks
from glm5.common.console import out
from glm5.engine.runner.fused.row_sharding import MIN_SHARDED_ROWS
from glm5.kernels.act_quant import act_quant
from glm5.kernels.add_rms_norm import add_rms_norm
from glm5.kernels.all_reduce import all_reduce_reference
from glm5.kernels.all_reduce.part import summed
from glm5.kernels.block_scaled import BlockScaled, quantize_blocks
from glm5.kernels.compile_ahead import missing
from glm5.kernels.fp8_linear import cuda_rows, fp8_linear
from glm5.kernels.fp8_linear.pending import PendingLinear
from glm5.kernels.grouped_experts import FEW_TOKENS
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.parallel.cuda import BUFFER_BYTES, CudaGroup
from glm5.parallel.group import Group
from glm5.parallel.rendezvous import open_group, store_at
from glm5.parallel.table import Shard
from glm5.testing.numerics import rel_rms

WIDTH = 6144
HEADS = 4096  # outputs of 16 heads
LATENTS = 2752  # q_a, kv_a and index key side by side
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
EDGES = ((1, 8), (3, 136), (5, 1032), (17, 2048), (131, 6144))
BUDGET = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 1e-6}
E4M3 = 0.04
REPEATS, CALLS, REPLAYS = 20, 100, 7
EPS = 1e-5
SECONDS = 300

AllReduce = Callable[[Tensor], Tensor]
AllReduceNorm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def sums(group: CudaGroup) -> dict[str, AllReduce]:
    """All-reduce by algorithm, NCCL's among them."""
    from glm5.kernels.all_reduce.triton import one_shot, two_shot

    buffers = group.buffers
    assert buffers is not None, "no symmetric memory here"
    return {
        "one shot": lambda part: one_shot(buffers, part)[0],
        "two shots": lambda part: two_shot(buffers, part)[0],
        "in two collectives": group.all_reduce_nccl,
        "chosen": group.all_reduce,
        "NCCL": _nccl,
    }


def norms(group: CudaGroup) -> dict[str, AllReduceNorm]:
    """All-reduce with residual add and norm, by algorithm."""
    from glm5.kernels.all_reduce.triton import one_shot, two_shot

    buffers = group.buffers
    assert buffers is not None, "no symmetric memory here"
    return {
        "one shot": lambda x, residual, weight: one_shot(buffers, x, (residual, weight, EPS)),
        "two shots": lambda x, residual, weight: two_shot(buffers, x, (residual, weight, EPS)),
        "chosen": lambda x, residual, weight: group.add_rms_norm(x, residual, weight, EPS, quantize=None)[:2],
        "NCCL, then add_rms_norm": lambda x, residual, weight: add_rms_norm(_nccl(x), residual, weight, EPS),
    }


def _nccl(part: Tensor) -> Tensor:
    part = part.clone()
    dist.all_reduce(part)
    return part


def check_sharded(group: CudaGroup) -> None:
    """Check the reduce-scatter with norm and the gather of its rows, interleaved with the other collectives."""
    (rank, size), eps = group.shard, EPS
    for dtype, budget in BUDGET.items():
        for number, (share, width) in enumerate(((1, 8), (3, 136), (64, 6144), (1500, 6144), (5, 1032))):
            rows = share * size
            parts, local = _parts(group.shard, rows, width, dtype, number), slice(rank * share, (rank + 1) * share)
            residual, weight = _parts(group.shard, 2, rows * width, dtype, 99)[0, 0].view(rows, width), parts[0, 0]
            expected = add_rms_norm(all_reduce_reference(parts), residual, weight, eps, impl="reference")
            run = partial(group.add_rms_norm_sharded, parts[rank], residual[local], weight, eps, quantize="blocks")
            first = run()
            assert torch.equal(first[1], expected[1][local]), f"sharded {rows=} {width=} {dtype=}: sum"
            error = rel_rms(first[0], expected[0][local].double())
            assert error < budget, f"sharded {rows=} {width=} {dtype=} {error=}: norm"
            assert first[2] is not None
            dequantized = first[2][0].double() * first[2][1].double().repeat_interleave(128, dim=1)[:, :width]
            assert rel_rms(dequantized, first[0].double()) < E4M3, f"sharded {rows=} {width=} {dtype=}: FP8"
            outputs = ExpertOutputs(parts[rank].repeat(3, 1) * 0.3, rows, 2, has_shared=True)
            ways = [
                group.add_rms_norm_sharded(x, residual[local], weight, eps, quantize=None)
                for x in (outputs, summed(outputs))
            ]
            assert torch.equal(ways[0][1], ways[1][1]), f"expert outputs sharded {rows=} {width=} {dtype=}"
            ways = [group.add_rms_norm(x, residual, weight, eps, quantize=None) for x in (outputs, summed(outputs))]
            assert torch.equal(ways[0][1], ways[1][1]), f"expert outputs {rows=} {width=} {dtype=}"
            for _ in range(REPEATS):
                again = run()
                assert all(torch.equal(one, other) for one, other in zip(again[:2], first[:2], strict=True))
                gathered = group.all_gather(again[0])
                assert torch.equal(group.all_reduce(parts[rank][:3]), all_reduce_reference(parts[:, :3]))
                error = rel_rms(gathered.flatten(0, 1), expected[0].double())
                assert error < budget, f"gathered {rows=} {width=} {dtype=} {error=}"


def check_overlapped(group: CudaGroup) -> None:
    """Check the product that sends rows while others are computed: bitwise equal to summing finished products."""
    (rank, size), eps = group.shard, EPS
    _look_up_overlapped(group)
    for rows, columns in ((1408, 256), (1408, 1024), (2048, 1536)):
        share = rows // size
        local = slice(rank * share, (rank + 1) * share)
        both = _parts(group.shard, rows, columns + WIDTH, torch.bfloat16, share)[0]
        x, residual = (part.contiguous() for part in both.split([columns, WIDTH], dim=1))
        weights = [quantize_blocks(each) for each in _parts(group.shard, WIDTH, columns, torch.float32, share)]
        products = torch.stack([cuda_rows.fp8_linear(x, weight) for weight in weights])
        error = rel_rms(products[rank], fp8_linear(x.double(), weights[rank], impl="reference"))
        assert error < BUDGET[torch.bfloat16], f"product of {columns=} {error=}"
        expected = add_rms_norm(all_reduce_reference(products), residual, residual[0], eps, impl="reference")
        pending = PendingLinear(x, weights[rank], None)
        for _ in range(REPEATS):
            got = group.add_rms_norm_sharded(pending, residual[local], residual[0], eps, quantize=None)
            assert torch.equal(got[1], expected[1][local]), f"sent {rows=} {columns=}: sum"
        wrong = PendingLinear(x, BlockScaled(weights[rank].data, weights[rank].scale * 1.1), None)
        got = group.add_rms_norm_sharded(wrong, residual[local], residual[0], eps, quantize=None)
        assert not torch.equal(got[1], expected[1][local])


def _look_up_overlapped(group: CudaGroup) -> None:
    """Look up the kernels without running them, as an engine does: a run would leave rows in peers' buffers."""
    x = torch.ones(2048, 256, dtype=torch.bfloat16, device=group.device)
    weight, residual = (
        quantize_blocks(x[:1, :1].expand(WIDTH, 256).float()),
        x.new_zeros(2048 // group.shard.size, WIDTH),
    )
    with missing():
        group.add_rms_norm_sharded(PendingLinear(x, weight, None), residual, residual[0], EPS, quantize=None)


def fits(group: CudaGroup, way: str, part: Tensor) -> bool:
    from glm5.kernels.all_reduce.triton import fits as has_room

    assert group.buffers is not None
    if way not in ("one shot", "two shots"):
        return True
    return has_room(group.buffers, part, len(part), two_shot=way == "two shots")


def check(group: CudaGroup) -> dict[str, float]:
    """The largest error of each algorithm. AssertionError if one exceeds its budget or differs between runs or
    ranks."""
    worst: dict[str, float] = {}
    for dtype, budget in BUDGET.items():
        for number, (rows, width) in enumerate((*EDGES, *((rows, WIDTH) for rows in (1, 8, 64, 600)))):
            parts = _parts(group.shard, rows, width, dtype, number)
            part, exact = parts[group.shard.rank], parts.double().sum(dim=0)
            residual, weight = _parts(group.shard, 2, rows * width, dtype, 99)[0, 0].view(rows, width), parts[0, 0]
            expected = add_rms_norm(all_reduce_reference(parts), residual, weight, EPS, impl="reference")
            for name, way in sums(group).items():
                if not fits(group, name, part):
                    continue
                first = way(part)
                error = rel_rms(first, exact)
                assert error < budget * (3 if name == "NCCL" else 1), f"{name} {rows=} {width=} {dtype=} {error=}"
                worst[name] = max(worst.get(name, 0.0), error / budget)
                if name != "NCCL":
                    assert torch.equal(first, all_reduce_reference(parts)), f"{name} {rows=} {width=} {dtype=}"
                    _same(group, name, partial(way, part), first)
            for name, joined in norms(group).items():
                if not fits(group, name, part) or name.startswith("NCCL"):
                    continue
                normed, total = joined(part, residual, weight)
                assert torch.equal(total, expected[1]), f"{name} {rows=} {width=} {dtype=}: sum"
                error = rel_rms(normed, expected[0].double())
                assert error < budget, f"{name} {rows=} {width=} {dtype=} {error=}: norm"
                _same(group, name, partial(_normed, joined, part, residual, weight), normed)
    wrong = _parts(group.shard, 8, WIDTH, torch.bfloat16, 1)
    exact = wrong.double().sum(dim=0)
    result = group.all_reduce(wrong[group.shard.rank] * (1.1 if group.shard.rank == 0 else 1.0))
    assert rel_rms(result, exact) > 3 * BUDGET[torch.bfloat16], "the budget notices nothing"
    _check_gather(group)
    check_sharded(group)
    check_overlapped(group)
    return worst


def _normed(way: AllReduceNorm, part: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return way(part, residual, weight)[0]


def _check_gather(group: CudaGroup) -> None:
    for count in (1, 7, 1000, 40_000, 1_000_003):
        for dtype in (torch.float64, torch.int64, torch.int32, torch.float32):
            parts = _parts(group.shard, 1, count, torch.float32, count).mul(1000).to(dtype)
            for _ in range(REPEATS):
                assert torch.equal(group.all_gather(parts[group.shard.rank]), parts), f"gather {count=} {dtype=}"
    for share in (1, 5, 96, 1024):
        rows = _parts(group.shard, share, 200, torch.float32, share)
        codes = rows.mul(99).to(torch.uint8)
        for _ in range(REPEATS):
            local = [each[group.shard.rank] for each in (codes, rows, rows[:, :, :8])]
            got = group.gather_rows(local[0], local[1].T.contiguous().T, local[2].contiguous())
            for one, want in zip(got, (codes, rows, rows[:, :, :8]), strict=True):
                assert torch.equal(one, want.flatten(0, 1)), f"gathered rows {share=}"


def _parts(shard: Shard, rows: int, width: int, dtype: torch.dtype, number: int) -> Tensor:
    """Random inputs of all ranks, the same on each; with zeros of both signs."""
    generator = torch.Generator(device="cuda").manual_seed(number)
    parts = torch.randn(shard.size, rows, width, device="cuda", generator=generator).to(dtype)
    parts[:, 0, :2] = torch.tensor([0.0, -0.0], device="cuda", dtype=dtype)[: parts.shape[2]]
    return parts


def _same(group: Group, name: str, run: Callable[[], Tensor], first: Tensor) -> None:
    for _ in range(REPEATS):
        assert torch.equal(run(), first), f"{name}: another result in a repeat"
    others = torch.empty((group.shard.size, *first.shape), dtype=first.dtype, device=first.device)
    dist.all_gather_into_tensor(others, first)
    assert all(torch.equal(one, first) for one in others), f"{name}: another result on another rank"


def measure(run: Callable[[], object]) -> float:
    """Microseconds of a call, of the slowest rank."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            run()
    times: list[float] = []
    for _ in range(REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        times.append(milliseconds(graph.replay) * 1e3 / CALLS)
    worst = torch.tensor(sorted(times)[REPLAYS // 2], device="cuda")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def time_all(group: CudaGroup, counts: Sequence[int]) -> list[dict[str, object]]:
    """Microseconds by algorithm, one dict for each number of rows."""
    rows: list[dict[str, object]] = []
    weight = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    for count in counts:
        part = torch.randn(count, WIDTH, device="cuda").to(torch.bfloat16)
        found: dict[str, object] = {"rows": count, "bytes": part.numel() * 2}
        for name, way in sums(group).items():
            if fits(group, name, part):
                found[name] = round(measure(partial(way, part)), 1)
        for name, joined in norms(group).items():
            if fits(group, name, part):
                found[f"+ norm, {name}"] = round(measure(partial(joined, part, part, weight)), 1)
        if count > FEW_TOKENS:
            found |= time_expert_outputs(group, part, weight)
        if count >= MIN_SHARDED_ROWS and count % group.shard.size == 0:
            found |= time_sharded(group, part, weight)
        rows.append(found)
        if group.shard.rank == 0:
            out(json.dumps(found))
    few = torch.randn(2, 64, device="cuda", dtype=torch.float64)
    gathered = {"gather": few.numel() * 8, "us": round(measure(lambda: group.all_gather(few)), 1)}
    if group.shard.rank == 0:
        out(json.dumps(gathered))
    return rows


def time_expert_outputs(group: CudaGroup, part: Tensor, weight: Tensor) -> dict[str, float]:
    """Microseconds of all-reduce with norm on unsummed expert outputs, all rows on every rank."""
    outputs, given = ExpertOutputs(part.repeat(ACTIVE + 1, 1), len(part), ACTIVE, has_shared=True), (part, weight, EPS)
    ways = {
        "all-reduce of expert outputs": lambda: group.add_rms_norm(outputs, *given, quantize="blocks"),
        "all-reduce of their sums": lambda: group.add_rms_norm(outputs.summed(), *given, quantize="blocks"),
    }
    return {name: round(measure(way), 1) for name, way in ways.items()}


def time_sharded(group: CudaGroup, part: Tensor, weight: Tensor) -> dict[str, float]:
    """Microseconds with rows sharded over ranks: reduce-scatter with norm and FP8, and the gathers of a GLM-5 layer."""
    local = part[: len(part) // group.shard.size]
    fp8, latents = local.to(torch.float8_e4m3fn), local[:, :LATENTS].contiguous()
    scale, weights = (
        torch.rand(WIDTH // 128, len(local), device="cuda").T,
        torch.rand(len(local), ACTIVE, device="cuda"),
    )
    outputs = ExpertOutputs(part.repeat(ACTIVE + 1, 1), len(part), ACTIVE, has_shared=True)
    norm = partial(group.add_rms_norm_sharded, quantize="blocks")
    ways = {
        "reduce-scatter + norm + FP8": partial(norm, part, local, weight, EPS),
        "reduce-scatter of expert outputs": partial(norm, outputs, local, weight, EPS),
        "reduce-scatter of their sums": lambda: norm(outputs.summed(), local, weight, EPS),
        "all-gather in FP8": partial(group.all_gather, fp8),
        "all-gather with scales and routing weights": partial(group.gather_rows, fp8, scale, weights, weights),
        f"all-gather, {LATENTS} of bfloat16": partial(group.all_gather, latents),
    }
    if len(part) * WIDTH * 2 <= BUFFER_BYTES:
        weight_OD = quantize_blocks(torch.randn(WIDTH, HEADS, device="cuda"))
        x = part[:, :HEADS].contiguous()
        pending = PendingLinear(x, weight_OD, act_quant(x))
        ways[f"linear of {HEADS}"] = pending.computed
        ways["linear, then reduce-scatter"] = lambda: norm(pending.computed(), local, weight, EPS)
        ways["linear fused with reduce-scatter"] = partial(norm, pending, local, weight, EPS)
    return {name: round(measure(way), 1) for name, way in ways.items()}


def tune(group: CudaGroup) -> None:
    """Print microseconds by number of programs."""
    from glm5.kernels.all_reduce.triton import one_shot, two_shot

    buffers = group.buffers
    assert buffers is not None, "no symmetric memory here"
    weight = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    for count in (1, 8, 32, 128, 512):
        part = torch.randn(count, WIDTH, device="cuda").to(torch.bfloat16)
        norm = part, weight, EPS
        found: dict[str, object] = {"rows": count}
        for splits in (1, 2, 4, 8, 16):
            if splits * count <= buffers.max_programs:
                found[f"{splits} splits"] = round(measure(partial(one_shot, buffers, part, norm, splits)), 1)
        for programs in (16, 32, 64, 132):
            if programs <= 6 * count:
                found[f"{programs} programs"] = round(measure(partial(two_shot, buffers, part, norm, programs)), 1)
        if group.shard.rank == 0:
            out(json.dumps(found))


def rank_main(rank: int, size: int, port: int, counts: Sequence[int], *, tunes: bool) -> None:
    device = torch.device("cuda", rank)
    group = open_group(Shard(rank, size), device, store_at(port, size), timeout_s=SECONDS)
    assert isinstance(group, CudaGroup)
    worst = check(group)
    if rank == 0:
        out(
            f"{size} x {torch.cuda.get_device_name(device)}: right, to the bit and {REPEATS} times; "
            f"errors by budget {worst}"
        )
    if tunes:
        tune(group)
    time_all(group, counts)
    torch.cuda.synchronize()
    group.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of the messages that are timed")
    parser.add_argument("--tune", action="store_true", help="also by numbers of programs")
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, given.ranks, given.port, given.rows, tunes=given.tune)
        return 0
    need_gpus("a benchmark of sums", max(1, given.ranks))
    return run_ranks(__spec__.name, given.ranks, [*["--tune"] * given.tune, "--rows", *map(str, given.rows)])


if __name__ == "__main__":
    sys.exit(command(main))
