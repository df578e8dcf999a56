"""`glm5 train`: the stages of a recipe."""

import argparse
from pathlib import Path
from typing import Any

from glm5.cli.flags import add_flags, read
from glm5.common.console import out
from glm5.config.train import TrainConfig, read_recipe


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("train", help="train as a recipe says", description=TrainConfig.__doc__)
    add_flags(parser, TrainConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(TrainConfig, args)
    recipe = read_recipe(settings.recipe, settings.set)
    if settings.dry_run:
        from glm5.train.estimate import estimate

        out(estimate(recipe))
        return 0
    from glm5.train.loop import train

    out(f"trained: {train(recipe, Path(settings.recipe).parent, restart=settings.restart)}")
    return 0
