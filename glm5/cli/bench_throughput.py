"""`glm5 bench throughput`: flags only; what it does is in bench.py."""

import argparse
from typing import Any

from glm5.cli import bench
from glm5.cli.flags import add_flags, read
from glm5.config.bench import ThroughputConfig


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "throughput", help="tokens a second of requests that come at once", description=ThroughputConfig.__doc__
    )
    add_flags(parser, ThroughputConfig)


def run(args: argparse.Namespace) -> int:
    return bench.run("throughput", read(ThroughputConfig, args))
