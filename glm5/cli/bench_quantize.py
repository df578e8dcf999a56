"""`glm5 bench quantize`: methods of quantization side by side on models of the demo. Tables go to standard output."""

import argparse
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.quantize import LadderConfig


def add(parser: Parser) -> None:
    add_flags(parser, LadderConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(LadderConfig, args)
    from glm5.demo.quality import texts_of
    from glm5.quantize.ladder import run_ladder
    from glm5.quantize.ladder_report import as_text, summary, write_report

    rows = run_ladder(settings, lambda model: texts_of(model, settings.num_questions, settings.num_samples))
    said = write_report(Path(settings.out), rows)
    out(as_text(summary(rows)) + "\n")
    for line in said:
        out(line)
    return 0
