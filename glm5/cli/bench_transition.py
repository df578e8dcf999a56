"""`glm5 bench transition`: dense attention to selected keys, beside windows. The table goes to standard output."""

import argparse
import time
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.transition import TransitionConfig


def add(parser: Parser) -> None:
    add_flags(parser, TransitionConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(TransitionConfig, args)
    from glm5.bench.transition.report import as_text, lines, verdicts, write_report
    from glm5.bench.transition.run import transitions

    began = time.perf_counter()
    done = transitions(settings)
    seconds = time.perf_counter() - began
    write_report(Path(settings.out), done, settings.model_dump(mode="json"), seconds)
    found = lines(done)
    out(as_text(found) + "\n")
    for text, holds in verdicts(found).items():
        out(text if holds else f"NOT SHOWN: {text}")
    cpu = sum(one.cpu_seconds for one in done)
    out(
        f"{len(settings.seeds)} seeds in {seconds:.0f} s, {cpu:.0f} s of processor time; {settings.out}/transition.html"
    )
    return 0
