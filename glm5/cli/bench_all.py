"""`glm5 bench all`: every measurement of a model on this machine, in parts that can be done one after the other."""

import argparse
from pathlib import Path
from typing import Any

from glm5.cli.cached import kernels_in
from glm5.cli.flags import add_flags, read
from glm5.config.bench_all import BenchAllConfig


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "all", help="everything about a model on this machine, part by part", description=BenchAllConfig.__doc__
    )
    add_flags(parser, BenchAllConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(BenchAllConfig, args)
    from glm5.bench.all.run import run as measure

    kernels = Path(settings.work).absolute() / "kernels"
    with kernels_in(kernels):
        return measure(settings, kernels)
