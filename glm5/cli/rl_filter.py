"""`glm5 rl filter`: the tasks of a recipe that are neither too easy nor too hard. The table goes to standard output."""

import argparse

from glm5.cli.deterministic import prepare_deterministic
from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.rl import read_rl_recipe
from glm5.config.rl_filter import RLFilterConfig


def add(parser: Parser) -> None:
    add_flags(parser, RLFilterConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(RLFilterConfig, args)
    recipe = read_rl_recipe(settings.recipe, settings.set)
    prepare_deterministic(wanted=recipe.rollouts.deterministic)
    from glm5.rl.filter import filter_tasks

    out(filter_tasks(recipe, settings))
    return 0
