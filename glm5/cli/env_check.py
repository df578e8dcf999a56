"""`glm5 env check`: whether an environment's rewards can be trusted. Exit code 1 where a task has not passed."""

import argparse

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.env import EnvCheckConfig


def add(parser: Parser) -> None:
    add_flags(parser, EnvCheckConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(EnvCheckConfig, args)
    from glm5.rl.check import check

    table, has_passed = check(settings)
    out(table)
    return int(not has_passed)
