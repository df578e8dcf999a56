"""`glm5 bench latency`: flags only; what it does is in bench.py."""

import argparse

from glm5.cli import bench
from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.config.bench import LatencyConfig


def add(parser: Parser) -> None:
    add_flags(parser, LatencyConfig)


def run(args: argparse.Namespace) -> int:
    return bench.run("latency", read(LatencyConfig, args))
