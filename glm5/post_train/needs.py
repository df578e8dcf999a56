"""What the stages of a recipe need in memory and time, as their own commands estimate it.

Each stage is a process of its own, so the largest counts in memory, and in time the sum. Quantization has no estimate:
it holds two layers at a time (docs/quantize.md).
"""

from collections.abc import Sequence
from typing import NamedTuple

from glm5.config.post_train import PostTrainRecipe
from glm5.config.rl import RLRecipe
from glm5.config.train import ModelSection, Recipe
from glm5.post_train.plan import Plan, Stage
from glm5.rl.estimate import needs as needs_of_rl
from glm5.rl.estimate import process_bytes
from glm5.train.build import model_config
from glm5.train.estimate import GIB, format_duration
from glm5.train.estimate import needs as needs_of_training
from glm5.train.stage_trainer import device_of


class Needs(NamedTuple):
    """Of a stage: bytes at its peak, and seconds; None of those that its command does not estimate."""

    num_bytes: float | None
    seconds: float | None


def needs_of(plan: Plan) -> dict[str, Needs]:
    """By stage, from configs alone: the architecture is that of the first stage, and no checkpoint need be there."""
    return {stage.name: _needs(plan.recipe, plan, stage) for stage in plan.stages}


def _needs(recipe: PostTrainRecipe, plan: Plan, stage: Stage) -> Needs:
    if not isinstance(stage.recipe, Recipe | RLRecipe):
        return Needs(None, None)
    first = stage
    while (start := recipe.start_of(first.section)) is not None:
        first = plan.stage(start)
    assert isinstance(first.recipe, Recipe | RLRecipe)
    own = stage.recipe.model
    model: ModelSection = first.recipe.model.model_copy(update={"dtype": own.dtype, "compute": own.compute})
    cfg = model_config(model)
    if isinstance(stage.recipe, RLRecipe):
        return Needs(*needs_of_rl(cfg, stage.recipe.model_copy(update={"model": model})))
    num_bytes, seconds = needs_of_training(cfg, stage.recipe.model_copy(update={"model": model}))
    return Needs(num_bytes + process_bytes(device_of(stage.recipe.device)), seconds)


def table_of(plan: Plan) -> str:
    """The text of `--dry-run`."""
    needs = needs_of(plan)
    rows = [("stage", "command", "starts from", "memory", "time")]
    for stage in plan.stages:
        start, (num_bytes, seconds) = plan.recipe.start_of(stage.section), needs[stage.name]
        memory = "" if num_bytes is None else f"{num_bytes / GIB:.3g} GiB"
        rows.append((stage.name, stage.kind, start or "", memory, "" if seconds is None else format_duration(seconds)))
    known = [one for one in needs.values() if one.num_bytes is not None]
    largest = max((one.num_bytes or 0.0 for one in known), default=0.0)
    total = sum(one.seconds or 0.0 for one in known)
    rows.append(("all", "", "", f"{largest / GIB:.3g} GiB", format_duration(total)))
    return aligned(rows) + "\ntime of reinforcement learning is at most that; measurements and quantization come on top"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines with columns of equal width, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
