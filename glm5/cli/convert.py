"""`glm5 convert`: FP8 to BF16 and back, tensor by tensor."""

import argparse
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.quantize import ConvertConfig


def add(parser: Parser) -> None:
    add_flags(parser, ConvertConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(ConvertConfig, args)
    from glm5.quantize.convert import convert

    shards = int(settings.max_shard_gb * 1e9)
    path = convert(settings.model, Path(settings.out), settings.dtype, shards, overwrite=settings.overwrite)
    out(f"wrote {path}; look at it with  glm5 inspect {path}")
    return 0
