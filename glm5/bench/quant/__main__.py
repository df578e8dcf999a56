"""`python -m glm5.bench.quant`: SSZ compared with a grid of 100 scales, and batched experts with loops over experts.

The second table runs each algorithm on all experts at once, in a loop over experts, and in a loop with msModelSlim's
version if there is one. Loops are timed over `--loop` experts and projected to all.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from glm5.bench.command import command, need_gpus
from glm5.common.console import out
from glm5.quant.chunks import chunks
from glm5.quant.gptq import gptq, gram
from glm5.quant.hadamard import random_hadamard
from glm5.quant.minmax import as_groups, fake_quantize, minmax, quantize
from glm5.quant.qat import int4
from glm5.quant.record import INT4_CHANNEL, INT4_GROUP, W4A8, W8A8, Grid
from glm5.quant.smooth import Smoothing, Target, flex_awq, flex_smooth
from glm5.quant.ssz import ssz, ssz_upstream


class Work(NamedTuple):
    """Experts [E, O, K], their tokens [E, T, K], Hessians [E, K, K] and scales [E, O, 1]."""

    weight: Tensor
    x: Tensor
    hessian: Tensor
    scale: Tensor


ROWS = 512  # of the first table
T = TypeVar("T")
Run = Callable[[Work], Tensor | Smoothing]


def runs(width: int) -> dict[str, tuple[Run, Run | None]]:
    """By name: this package's algorithm, and msModelSlim's (for GPTQ: one column at a time) or None."""
    rotation = random_hadamard(width, 1)
    return {
        "int8 min-max": (lambda w: quantize(w.weight, W8A8.weight).codes, None),
        "int4 of QAT": (lambda w: int4(w.weight).codes, None),
        "ssz, channel": (lambda w: ssz(w.weight, INT4_CHANNEL), lambda w: ssz_upstream(w.weight, INT4_CHANNEL)),
        "ssz, groups": (lambda w: ssz(w.weight, INT4_GROUP), None),
        "rotation": (lambda w: rotation.apply(w.weight), None),
        "flex_smooth": (
            lambda w: flex_smooth(w.x, [Target(w.weight, W8A8)]),
            lambda w: flex_smooth(w.x, [Target(w.weight, W8A8)], upstream=True),
        ),
        "flex_awq": (
            lambda w: flex_awq(w.x, [Target(w.weight, W4A8)]),
            lambda w: flex_awq(w.x, [Target(w.weight, W4A8)], upstream=True),
        ),
        "gptq": (
            lambda w: gptq(w.weight, w.hessian, INT4_CHANNEL, w.scale).codes,
            lambda w: gptq(w.weight, w.hessian, INT4_CHANNEL, w.scale, block=1).codes,
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m glm5.bench.quant")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--outputs", type=int, default=32)
    parser.add_argument("--inputs", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16, help="of an expert")
    parser.add_argument("--loop", type=int, default=None, help="experts of a timed loop (default: all)")
    parser.add_argument("--only", default="", help="algorithms whose name contains this")
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        need_gpus("a benchmark on a GPU")
    torch.manual_seed(0)
    with torch.device(args.device), torch.inference_mode():
        if not args.only:
            scales(args.device)
        stacks(args)
    return 0


def scales(device: str) -> None:
    """Print relative errors of int4 weights [ROWS, 2048], and milliseconds."""
    heads = ("min-max", "SSZ 10", "SSZ 50", "ours", "grid", "over grid")
    out(f"{'weights':<20} {' '.join(f'{head:>8}' for head in heads)}  ms: SSZ 50, ours, grid")
    for grid in (INT4_CHANNEL, INT4_GROUP):
        for name, weight in _distributions(ROWS, 2048).items():
            methods: list[Callable[[Tensor, Grid], Tensor]] = [
                lambda w, grid: minmax(w, grid)[0],
                lambda w, grid: ssz_upstream(w, grid, 10),
                ssz_upstream,
                ssz,
                best_of_a_hundred,
            ]
            found = [_timed(lambda m=m, w=weight, g=grid: m(w, g), device) for m in methods]
            errors = [float((fake_quantize(weight, grid, s) - weight).norm() / weight.norm()) for s, _ in found]
            shown_errors = " ".join(f"{error:8.5f}" for error in errors)
            times = ", ".join(f"{1e3 * seconds:.0f}" for _, seconds in found[2:])
            out(f"{grid.scope + ' ' + name:<20} {shown_errors} {errors[3] / errors[4] - 1:9.3%}  {times}")


def best_of_a_hundred(weight: Tensor, grid: Grid) -> Tensor:
    """The scale of least error among 100 even steps from min-max's down to a tenth of it, in chunks like SSZ."""
    scale, _ = minmax(weight, grid)
    for some, rows in chunks(weight.unsqueeze(0)):
        groups, first = as_groups(weight.unsqueeze(0)[some, rows], grid), scale.unsqueeze(0)[some, rows]
        best, least, error = first, torch.full_like(first, torch.inf), torch.empty_like(groups)
        for i in range(100):
            each = first * (1 - 0.009 * i)
            torch.mul(groups, each.reciprocal().unsqueeze(-1), out=error).round_().clamp_(
                grid.quant_min, grid.quant_max
            )
            squared_error = error.mul_(each.unsqueeze(-1)).sub_(groups).square_().sum(-1)
            better = squared_error < least
            best, least = torch.where(better, each, best), torch.where(better, squared_error, least)
        scale.unsqueeze(0)[some, rows] = best
    return scale


def stacks(args: argparse.Namespace) -> None:
    dtype, shape = getattr(torch, args.dtype), (args.experts, args.outputs, args.inputs)
    weight = torch.randn(shape, dtype=dtype)
    x = torch.randn(args.experts, args.tokens, args.inputs, dtype=dtype) * torch.randn(args.inputs, dtype=dtype).exp()
    work = Work(weight, x, gram(x), ssz(weight, INT4_CHANNEL))
    loop = min(args.loop or args.experts, args.experts)
    out(f"\n{list(shape)} {args.dtype}, {args.tokens} tokens each, on {args.device}; loops of {loop} projected to all")
    out(f"{'algorithm':<16} {'stack s':>9} {'loop s':>9} {'':>6} {'upstream s':>10} {'':>6}  stack == loop")
    for name, (ours, upstream) in runs(args.inputs).items():
        if args.only not in name:
            continue
        _timed(lambda run=ours: run(_member(work, 0)), args.device)
        stacked, seconds = _timed(lambda run=ours: run(work), args.device)
        looped, loop_seconds = _timed(lambda run=ours: [run(_member(work, e)) for e in range(loop)], args.device)
        loop_seconds *= args.experts / loop
        line = f"{name:<16} {seconds:9.3f} {loop_seconds:9.3f} {loop_seconds / seconds:5.1f}x"
        if upstream is not None:
            _, upstream_seconds = _timed(lambda run=upstream: [run(_member(work, e)) for e in range(loop)], args.device)
            upstream_seconds *= args.experts / loop
            line += f" {upstream_seconds:10.3f} {upstream_seconds / seconds:5.1f}x"
        else:
            line += " " * 18
        stack_results = _results(stacked, work.weight)
        loop_results = [_results(part, work.weight[e]) for e, part in enumerate(looped)]
        found = [_same(name, [each[name] for each in loop_results], result) for name, result in stack_results.items()]
        out(f"{line}  {', '.join(found)}", flush=True)


def _member(work: Work, e: int) -> Work:
    return Work(*(part[e] for part in work))


def _results(found: Tensor | Smoothing, weight: Tensor) -> dict[str, Tensor]:
    """The compared tensors by name. For smoothing: exponents, scales and the codes of smoothed weights."""
    if isinstance(found, Tensor):
        return {"": found}
    codes = quantize(weight * found.scale.unsqueeze(-2), W8A8.weight).codes
    return {"exponents": torch.stack([found.alpha, found.beta], -1), "scales": found.scale, "codes": codes}


def _same(name: str, looped: list[Tensor], stacked: Tensor) -> str:
    same = torch.stack([part == stacked[e] for e, part in enumerate(looped)]).float().mean().item()
    return f"{name} {'every bit' if same == 1 else f'{same:.4%}'}".strip()


def _distributions(rows: int, cols: int) -> dict[str, Tensor]:
    u = torch.rand(rows, cols) - 0.5
    chi_squared = torch.randn(rows, cols, 4).square().sum(-1)
    normal = torch.randn(rows, cols)
    return {
        "gaussian": normal,
        "t4": normal / (chi_squared / 4).sqrt(),
        "laplace": -u.sign() * torch.log1p(-2 * u.abs()),
    }


def _timed(run: Callable[[], T], device: str) -> tuple[T, float]:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(command(main))
