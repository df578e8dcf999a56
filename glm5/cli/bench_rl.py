"""`glm5 bench rl`: reinforcement learning, alone or beside another library. The table goes to standard output."""

import argparse
import os
import sys

from glm5.cli.flags import add_flags, read
from glm5.cli.folders import check_parent
from glm5.cli.parser import Parser
from glm5.common.atomic import atomic_write_json
from glm5.common.console import out
from glm5.config.bench_rl import BenchRLConfig
from glm5.config.rl import read_rl_recipe


def add(parser: Parser) -> None:
    add_flags(parser, BenchRLConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(BenchRLConfig, args)
    check_parent("--json", settings.json_)
    recipe = read_rl_recipe(settings.recipe, settings.set)
    from glm5.bench.rl.report import document, table
    from glm5.bench.rl.run import measure
    from glm5.bench.rl.sides import ours, trl

    environment, sides = os.environ | {"HF_HUB_OFFLINE": "1"}, [ours(recipe)]
    if settings.against is not None:
        sides.append(trl(recipe, settings.peer_python or sys.executable, environment))
    measured = measure(sides, recipe, settings, environment, lambda line: out(line, flush=True))
    found = document(settings, recipe, measured)
    out("\n" + table(found))
    if settings.json_ is not None:
        atomic_write_json(settings.json_, found)
    return 0
