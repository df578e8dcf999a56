"""`glm5 quant`: compatible with msModelSlim's command line."""

import argparse
import logging

from glm5.cli import quantize
from glm5.cli.flags import add_flags, notes, read
from glm5.cli.parser import Parser
from glm5.config.quantize import QuantConfig

logger = logging.getLogger(__name__)


def add(parser: Parser) -> None:
    add_flags(parser, QuantConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(QuantConfig, args)
    for line in notes(settings):
        logger.info("%s", line)
    return quantize.execute(settings.settings())
