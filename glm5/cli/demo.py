"""`glm5 demo`: from nothing to a small model that answers over the OpenAI API."""

import argparse
import shutil
import sys
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.config.files import DemoConfig


def add(parser: Parser) -> None:
    add_flags(parser, DemoConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(DemoConfig, args)
    from glm5.demo.tour import run_demo

    kept = None if settings.kept_model is None else Path(settings.kept_model)
    return run_demo(Path(settings.out), program=_program(), kept=kept)


def _program() -> str:
    """What to type for glm5 in the shell that started this: `make run` uses a script that is not on its path."""
    if shutil.which("glm5"):
        return "glm5"
    return sys.argv[0] if Path(sys.argv[0]).name == "glm5" else f"{sys.executable} -m glm5"
