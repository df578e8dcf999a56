"""`glm5 rl export`: conversations of a run as rows for supervised fine-tuning."""

import argparse

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.rl_records import RLExportConfig


def add(parser: Parser) -> None:
    add_flags(parser, RLExportConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(RLExportConfig, args)
    from glm5.rl.export import export

    out(export(settings))
    return 0
