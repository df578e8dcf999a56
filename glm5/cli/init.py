"""`glm5 init`: a checkpoint with random weights, for tests and measurements."""

import argparse
from pathlib import Path
from typing import Any

from glm5.cli.flags import add_flags, read
from glm5.common.console import out
from glm5.config.files import InitConfig
from glm5.config.presets import preset


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("init", help="write a random checkpoint", description=InitConfig.__doc__)
    add_flags(parser, InitConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(InitConfig, args)
    from glm5.checkpoint.init import write_random

    write_random(preset(settings.preset), Path(settings.out), seed=settings.seed)
    out(f"wrote {settings.out}; look at it with  glm5 inspect {settings.out}")
    return 0
