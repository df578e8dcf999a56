"""`glm5 env make swe`: tasks of software engineering. The table goes to standard output."""

import argparse

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.env import EnvMakeConfig


def add(parser: Parser) -> None:
    add_flags(parser, EnvMakeConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(EnvMakeConfig, args)
    from glm5.rl.swe.make import make_tasks

    out(make_tasks(settings))
    return 0
