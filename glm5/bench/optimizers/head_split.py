"""`python -m glm5.bench.optimizers.head_split`: Muon on q_b_proj, with and without a split by heads.

Half of the heads have small gradients. Orthogonalised as one matrix, their updates are small; split by heads, all
updates have the same size. Printed: RMS of the first update of both halves, its largest singular value within a head,
operations and time. `--plot` draws the update of every head.
"""

import argparse
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glm5.bench.command import command
from glm5.common.atomic import atomic_write
from glm5.common.console import out
from glm5.common.extras import require
from glm5.train.optim.muon import Muon
from glm5.train.optim.newton_schulz import flops

REPEATS = 3


class Measured(NamedTuple):
    """Update RMS by head, the largest singular value of any head, operations, median seconds."""

    rms_H: list[float]
    spectral: float
    operations: int
    seconds: float


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="glm5.bench.optimizers.head_split", description=__doc__)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64, help="of a head; GLM-5: 64 heads of 256 rows, 2048 columns")
    parser.add_argument("--cols", type=int, default=256)
    parser.add_argument("--smaller", type=float, default=100.0, help="how much smaller half of the gradients are")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plot", help="PNG to write (needs the extra plot)")
    args = parser.parse_args(argv)

    grad = gradients(args.heads, args.rows, args.cols, args.smaller, 0).to(args.device)
    ways = {"whole": (), "split": (args.rows,)}
    found = {name: measured(grad, args.heads, rows) for name, rows in ways.items()}

    out(f"{args.heads} heads of {args.rows} x {args.cols}, half with gradients {args.smaller:g} times smaller")
    out(f"{'':8}{'large':>9}{'small':>9}{'ratio':>8}{'spectral':>10}{'GFLOP':>10}{'ms':>10}")
    for name, one in found.items():
        large, small = (statistics.mean(half) for half in halves(one.rms_H))
        out(
            f"{name:8}{large:9.4f}{small:9.4f}{large / small:8.1f}{one.spectral:10.2f}"
            f"{one.operations / 1e9:10.2f}{one.seconds * 1e3:10.2f}"
        )
    if args.plot:
        _write_plot(args.plot, found, args.smaller)
    return 0


def gradients(heads: int, rows: int, cols: int, smaller: float, seed: int) -> Tensor:
    """Random gradients [heads * rows, cols], those of the second half of the heads so many times smaller."""
    grad = torch.randn(heads, rows, cols, generator=torch.Generator().manual_seed(seed))
    grad[heads // 2 :] /= smaller
    return grad.flatten(0, 1)


def measured(grad: Tensor, heads: int, rows: tuple[int, ...]) -> Measured:
    weight = nn.Parameter(torch.zeros_like(grad))
    weight.grad = grad
    seconds: list[float] = []
    for _ in range(REPEATS):
        weight.detach().zero_()
        muon = Muon([weight], {weight: rows}, lr=1.0, weight_decay=0.0)
        _wait(grad)
        start = time.perf_counter()
        muon.step()
        _wait(grad)
        seconds.append(time.perf_counter() - start)
    update_HXQ = weight.detach().float().unflatten(0, (heads, -1))
    operations = heads * flops(*update_HXQ.shape[1:]) if rows else flops(*grad.shape)
    rms_H = update_HXQ.square().mean(dim=(1, 2)).sqrt()
    spectral = torch.linalg.matrix_norm(update_HXQ, ord=2).max().item()
    return Measured(rms_H.tolist(), spectral, operations, statistics.median(seconds))


def halves(rms_H: list[float]) -> tuple[list[float], list[float]]:
    return rms_H[: len(rms_H) // 2], rms_H[len(rms_H) // 2 :]


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def _write_plot(path: str, found: dict[str, Measured], smaller: float) -> None:
    figure: Any = require("matplotlib.figure", "plot").Figure(figsize=(7.0, 3.2), layout="constrained")
    axes = figure.subplots()
    for shift, (name, one) in zip((-0.2, 0.2), found.items(), strict=True):
        axes.bar([head + shift for head in range(len(one.rms_H))], one.rms_H, width=0.4, label=name)
    axes.set(
        xlabel=f"head (the right half has gradients {smaller:g} times smaller)",
        ylabel="RMS of the update",
        yscale="log",
        ylim=(1e-3, 1.0),
        title="q_b_proj orthogonalised whole, and head by head (Muon Split)",
    )
    axes.legend()
    axes.grid(axis="y", alpha=0.3)
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


if __name__ == "__main__":
    sys.exit(command(main))
