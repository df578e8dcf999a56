"""`glm5 bench latency`: flags only; what it does is in bench.py."""

import argparse
from typing import Any

from glm5.cli import bench
from glm5.cli.flags import add_flags, read
from glm5.config.bench import LatencyConfig


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "latency", help="times of requests that come one by one", description=LatencyConfig.__doc__
    )
    add_flags(parser, LatencyConfig)


def run(args: argparse.Namespace) -> int:
    return bench.run("latency", read(LatencyConfig, args))
