"""`glm5 env serve`: an environment for clients of OpenEnv."""

import argparse
import signal

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common import open_files
from glm5.common.console import out
from glm5.common.extras import require
from glm5.config.env import EnvServeConfig


def add(parser: Parser) -> None:
    add_flags(parser, EnvServeConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(EnvServeConfig, args)
    for package in ("fastapi", "uvicorn", "websockets"):
        require(package, "serve")
    import asyncio

    from glm5.serve.openenv import serve

    def opened(port: int) -> None:
        out(f"{settings.name}: ws://{settings.host}:{port}/ws  (Ctrl-C ends it)", flush=True)

    open_files.allow_many()
    asyncio.run(serve(settings, opened))
    return 128 + signal.SIGTERM  # what ended it
