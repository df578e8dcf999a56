"""`glm5 bench hybrid`: sources of reward on a task with a hidden true reward. The table goes to standard output."""

import argparse
from functools import partial

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.bench_hybrid import BenchHybridConfig


def add(parser: Parser) -> None:
    add_flags(parser, BenchHybridConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(BenchHybridConfig, args)
    from glm5.bench.hybrid.compare import measure

    out(measure(settings, partial(out, flush=True)))
    return 0
