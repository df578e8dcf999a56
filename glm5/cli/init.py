"""`glm5 init`: a checkpoint with random weights, for tests and measurements."""

import argparse
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.files import InitConfig
from glm5.config.presets import preset


def add(parser: Parser) -> None:
    add_flags(parser, InitConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(InitConfig, args)
    from glm5.checkpoint.init import write_random, write_weightless
    from glm5.checkpoint.save import check_unwritten

    cfg, folder = preset(settings.preset, settings.num_hidden_layers), Path(settings.out)
    if not settings.overwrite:
        check_unwritten(folder)
    if settings.weights == "none":
        write_weightless(cfg, folder)
        out(f"wrote {folder}, which has no weights; serve it with  glm5 serve {folder} --load-format dummy")
        return 0
    write_random(cfg, folder, seed=settings.seed, fp8=settings.weights == "fp8")
    out(f"wrote {folder}; look at it with  glm5 inspect {folder}")
    return 0
