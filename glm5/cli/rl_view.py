"""`glm5 rl view`: a run's curves and rollouts in a browser."""

import argparse
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.rl_records import RLViewConfig


def add(parser: Parser) -> None:
    add_flags(parser, RLViewConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(RLViewConfig, args)
    from glm5.rl.view.server import serving

    with serving(Path(settings.folder), settings.host, settings.port) as server:
        out(f"{settings.folder}: http://{settings.host}:{server.server_port}  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0
