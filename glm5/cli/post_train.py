"""`glm5 post-train`: post-training in stages, up to a served checkpoint."""

import argparse

from glm5.cli.deterministic import prepare_deterministic
from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.post_train import PostTrainConfig, read_post_train


def add(parser: Parser) -> None:
    add_flags(parser, PostTrainConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(PostTrainConfig, args)
    recipe, tables = read_post_train(settings.recipe, settings.set)
    prepare_deterministic(wanted=True)
    if settings.dry_run:
        from glm5.post_train.needs import table_of
        from glm5.post_train.plan import Plan

        out(table_of(Plan(recipe, tables)))
        return 0
    from glm5.post_train.run import post_train

    return 0 if post_train(recipe, tables, settings.restart_from) else 1
