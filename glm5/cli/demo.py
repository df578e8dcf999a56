"""`glm5 demo`: from nothing to a small model that answers over the OpenAI API."""

import argparse
from pathlib import Path
from typing import Any

from glm5.cli.flags import add_flags, read
from glm5.config.files import DemoConfig


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo", help="train a small GLM-5, serve it and ask it", description=DemoConfig.__doc__
    )
    add_flags(parser, DemoConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(DemoConfig, args)
    from glm5.demo.tour import run_demo

    return run_demo(Path(settings.out))
