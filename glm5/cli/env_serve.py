"""`glm5 env serve`: an environment for clients of OpenEnv."""

import argparse

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.env import EnvServeConfig


def add(parser: Parser) -> None:
    add_flags(parser, EnvServeConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(EnvServeConfig, args)
    import asyncio

    from glm5.rl.openenv import serve

    def opened(port: int) -> None:
        out(f"{settings.name}: ws://{settings.host}:{port}/ws  (Ctrl-C ends it)", flush=True)

    asyncio.run(serve(settings, opened))
    return 0
