"""`glm5 bench frontend`: the server without a model. The table goes to standard output."""

import argparse
import os
from importlib.resources import files
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.folders import check_parent
from glm5.cli.parser import Parser
from glm5.common.atomic import atomic_write_json
from glm5.common.console import out
from glm5.common.errors import ConfigError
from glm5.common.extras import require
from glm5.config.bench_frontend import BenchFrontendConfig


def add(parser: Parser) -> None:
    add_flags(parser, BenchFrontendConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(BenchFrontendConfig, args)
    check_parent("--json", settings.json_)
    for package in ("fastapi", "uvicorn"):
        require(package, "serve")
    from glm5.bench.frontend.run import measure, table

    here = Path(str(files("glm5")))
    package = Path(settings.checkout or here.parent).expanduser().absolute()
    if not (package / "glm5/__init__.py").is_file():
        raise ConfigError(f"--checkout: {package} has no folder glm5")
    # The second folder is that of the scripted engine, which other versions do not have.
    paths = f"{package}{os.pathsep}{here / 'bench/frontend'}"
    result = measure(settings, here / "cli/frontend_server.py", os.environ | {"PYTHONPATH": paths})
    out(table(result))
    if settings.json_ is not None:
        atomic_write_json(settings.json_, result)
    return 0
