"""`glm5 train`: the stages of a recipe."""

import argparse
import importlib
import logging
import os
import sys
from pathlib import Path

from glm5.cli.deterministic import prepare_deterministic
from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.common.errors import UsageError
from glm5.common.interrupt import end_with_parent
from glm5.config.parallel import ParallelConfig
from glm5.config.quantize import QuantizeConfig
from glm5.config.train import Recipe, TrainConfig, read_recipe

logger = logging.getLogger(__name__)


def add(parser: Parser) -> None:
    add_flags(parser, TrainConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(TrainConfig, args)
    recipe = read_recipe(settings.recipe, settings.set)
    prepare_deterministic(wanted=recipe.deterministic)
    if recipe.workers:  # else each worker starts as many threads as there are cores
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    world = settings.nproc or started
    if world == 1 and recipe.parallel != ParallelConfig():
        logger.warning("one process: [parallel] is left out; --nproc N, or torchrun, starts several")
    if settings.dry_run:
        out(_needs(recipe, world))
        return 0
    to_pack = [recipe.folder / stage.name for stage in recipe.stage if stage.qat is not None]
    if to_pack:  # a missing dependency should fail before the training
        importlib.import_module("glm5.quantize.run")
    if recipe.tensorboard or recipe.wandb:  # its module imports torch, which the launcher of several ranks does without
        importlib.import_module("glm5.train.metrics").check_extras(recipe)
    if settings.nproc is not None and settings.nproc > 1:
        _launch(settings)
    elif started > 1:
        return _rank(settings, recipe)
    else:
        from glm5.train.loop import train

        out(f"trained: {train(recipe, Path(settings.recipe).parent, restart=settings.restart)}")
    for stage in to_pack:
        _pack(stage)
    return 0


def _needs(recipe: Recipe, world: int) -> str:
    """The output of `--dry-run`."""
    if world == 1:
        from glm5.train.estimate import estimate

        return estimate(recipe)
    from glm5.train.parallel.estimate import estimate_distributed

    return estimate_distributed(recipe, world)


def _launch(settings: TrainConfig) -> None:
    """Start this command once for each rank."""
    from glm5.train.parallel.launch import launch

    if "RANK" in os.environ:
        raise UsageError(f"--nproc {settings.nproc}: this process is rank {os.environ['RANK']} of a launcher already")
    changes = ["--set", *settings.set] if settings.set else []
    command = [sys.executable, "-m", "glm5", "train", settings.recipe, *changes]
    launch([*command, "--restart"] if settings.restart else command, settings.nproc or 1, os.environ)


def _rank(settings: TrainConfig, recipe: Recipe) -> int:
    """One of several processes, as torchrun starts them: the environment says which. Only rank 0 prints."""
    from glm5.train.parallel.launch import LAUNCHER
    from glm5.train.parallel.run import Rank, train_distributed

    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if missing := [name for name, value in given.items() if not value]:
        raise UsageError(f"WORLD_SIZE is above 1, but {missing[0]} is not set; start the processes with torchrun")
    rank = Rank(
        rank=int(os.environ["RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
        local=int(os.environ.get("LOCAL_RANK", "0")),
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    if (launcher := os.environ.get(LAUNCHER)) is not None:
        end_with_parent(int(launcher))
    if rank.rank:
        logging.getLogger("glm5").setLevel(logging.WARNING)
    best = train_distributed(recipe, Path(settings.recipe).parent, rank, restart=settings.restart)
    if not rank.rank:
        out(f"trained: {best}")
    return 0


def _pack(stage: Path) -> None:
    """Write the best checkpoint of an int4 quantization-aware stage as an int4 checkpoint."""
    from glm5.quantize.run import quantize

    best = (stage / "best" if (stage / "best").exists() else stage / "last").resolve()
    packed = stage / f"{best.name}-int4"
    if not packed.exists():
        plain = {"scheme": "w4a16", "method": "minmax", "held_out_tokens": 0}
        quantize(QuantizeConfig.model_validate({"model": str(best), "out": str(packed), **plain}))
    out(f"packed: {packed}")
