"""`glm5 quant`: msModelSlim's command line with another first word."""

import argparse
import logging
from typing import Any

from glm5.cli import quantize
from glm5.cli.flags import add_flags, notes, read
from glm5.config.quantize import QuantConfig

logger = logging.getLogger(__name__)


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quant", help="the same with msModelSlim's command line", description=QuantConfig.__doc__
    )
    add_flags(parser, QuantConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(QuantConfig, args)
    for line in notes(settings):
        logger.info("%s", line)
    return quantize.execute(settings.settings())
