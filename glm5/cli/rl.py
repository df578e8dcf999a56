"""`glm5 rl`: reinforcement learning by a recipe."""

import argparse
import os
from contextlib import nullcontext
from functools import partial

from glm5.cli.deterministic import prepare_deterministic
from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.rl import RLConfig, read_rl_recipe


def add(parser: Parser) -> None:
    add_flags(parser, RLConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(RLConfig, args)
    recipe = read_rl_recipe(settings.recipe, settings.set)
    prepare_deterministic(wanted=recipe.rollouts.deterministic)
    if settings.dry_run:
        from glm5.rl.estimate import estimate

        out(estimate(recipe))
        return 0
    from glm5.rl.build import here
    from glm5.rl.loop import run as train
    from glm5.train.metrics import check_extras

    check_extras(recipe)  # a missing package should fail before the training

    open_gateway = None
    if recipe.agent is not None:
        from glm5.serve.gateway import gateway

        open_gateway = partial(gateway, environment=dict(os.environ))
    nodes = nullcontext()
    if recipe.ray is not None:
        from glm5.adapters.ray_nodes import RayNodes

        nodes = RayNodes(recipe.ray)
    given = {"restart": settings.restart, "unsafe_local": settings.unsafe_local}
    with nodes as found:
        launcher = here if found is None else found.launch
        out(f"trained: {train(recipe, **given, open_gateway=open_gateway, launcher=launcher)}")
    return 0
