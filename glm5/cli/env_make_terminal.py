"""`glm5 env make terminal`: generated terminal tasks as task folders in Harbor's format."""

import argparse
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.env_make_terminal import EnvMakeTerminalConfig


def add(parser: Parser) -> None:
    add_flags(parser, EnvMakeTerminalConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(EnvMakeTerminalConfig, args)
    from glm5.rl.environments.terminal import write_tasks

    write_tasks(Path(settings.out), settings.tasks)
    out(f"wrote {settings.tasks} tasks; train on them as environment  harbor/{settings.out}")
    return 0
