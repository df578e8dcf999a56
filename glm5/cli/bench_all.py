"""`glm5 bench all`: every measurement of a model on this machine, in parts that can be done one after the other."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from glm5.cli.cached import kernels_in
from glm5.cli.flags import add_flags, read
from glm5.cli.folders import check_parent
from glm5.cli.main import parse
from glm5.cli.parser import Parser
from glm5.config.bench import LatencyConfig
from glm5.config.bench_all import BenchAllConfig
from glm5.config.bench_serve import BenchServeConfig
from glm5.config.command import Command
from glm5.config.serve import ServeConfig

_PARTS: dict[str, type[Command]] = {"latency": LatencyConfig, "serve": BenchServeConfig}


def add(parser: Parser) -> None:
    add_flags(parser, BenchAllConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(BenchAllConfig, args)
    check_parent("--json", settings.json_)
    from glm5.bench.all.check import check
    from glm5.bench.all.run import run as measure

    check(settings, _parsed)
    kernels = Path(settings.work).absolute() / "kernels"
    with kernels_in(kernels):
        return measure(settings, kernels)


def _parsed(command: Sequence[str]) -> Command:
    """The settings of a `glm5 serve` or `glm5 bench WHAT` command line."""
    args = parse(command)
    return read(ServeConfig if args.command == "serve" else _PARTS[args.what], args)
