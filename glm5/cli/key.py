"""`glm5 key`: an API key for `glm5 serve`, shown once; a file keeps its hash."""

import argparse
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.folders import check_parent
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.operations import KeyConfig


def add(parser: Parser) -> None:
    add_flags(parser, KeyConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(KeyConfig, args)
    from glm5.serve.http.keys import add_to_file

    path = Path(settings.file).expanduser()
    check_parent("--file", str(path))
    out(add_to_file(path, settings.model_dump(exclude={"file"}, exclude_none=True)))
    return 0
