"""`glm5 bench off-policy`: algorithms on rollouts of old weights. The table goes to standard output."""

import argparse
from functools import partial

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.bench_off_policy import BenchOffPolicyConfig


def add(parser: Parser) -> None:
    add_flags(parser, BenchOffPolicyConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(BenchOffPolicyConfig, args)
    from glm5.bench.off_policy import measure

    out(measure(settings, partial(out, flush=True)))
    return 0
