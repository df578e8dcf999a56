"""`glm5 rl replay`: a training step again, compared to the bit. Exit code 1 where it differs."""

import argparse
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.rl_records import RLReplayConfig


def add(parser: Parser) -> None:
    add_flags(parser, RLReplayConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(RLReplayConfig, args)
    from glm5.rl.replay import replay

    is_equal = True
    for difference in replay(Path(settings.folder), settings.step):
        out(str(difference), flush=True)
        is_equal = not difference.tensors
    return 0 if is_equal else 1
