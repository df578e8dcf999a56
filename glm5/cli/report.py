"""`glm5 report`: claims of the GLM-5 report, re-tested small."""

import argparse
from functools import partial

from glm5.cli.deterministic import prepare_deterministic
from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.report import ReportConfig


def add(parser: Parser) -> None:
    add_flags(parser, ReportConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(ReportConfig, args)
    prepare_deterministic(wanted=settings.row is not None)
    from glm5.bench.claims.rows import listed, measure, write_page

    if settings.list_:
        out(listed(settings))
    elif settings.row is not None:
        out(measure(settings, partial(out, flush=True)))
    else:
        out(f"written: {write_page(settings)}")
    return 0
