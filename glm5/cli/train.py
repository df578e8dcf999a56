"""`glm5 train`: the stages of a recipe."""

import argparse
import os
from pathlib import Path
from typing import Any

from glm5.cli.flags import add_flags, read
from glm5.common.console import out
from glm5.config.quantize import QuantizeConfig
from glm5.config.train import TrainConfig, read_recipe


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("train", help="train as a recipe says", description=TrainConfig.__doc__)
    add_flags(parser, TrainConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(TrainConfig, args)
    recipe = read_recipe(settings.recipe, settings.set)
    if recipe.deterministic:  # torch asks for it before it multiplies on a GPU in one order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if settings.dry_run:
        from glm5.train.estimate import estimate

        out(estimate(recipe))
        return 0
    from glm5.train.loop import train

    out(f"trained: {train(recipe, Path(settings.recipe).parent, restart=settings.restart)}")
    for stage in recipe.stage:
        if stage.qat is not None:
            _pack(recipe.folder / stage.name)
    return 0


def _pack(stage: Path) -> None:
    """Write the best checkpoint of a stage that was trained with int4 in view as the int4 that it was trained as."""
    from glm5.quantize.run import quantize

    best = (stage / "best" if (stage / "best").exists() else stage / "last").resolve()
    packed = stage / f"{best.name}-int4"
    if not packed.exists():
        plain = {"scheme": "w4a16", "method": "minmax", "held_out_tokens": 0}
        quantize(QuantizeConfig.model_validate({"model": str(best), "out": str(packed), **plain}))
    out(f"packed: {packed}")
