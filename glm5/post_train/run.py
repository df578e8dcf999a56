"""`glm5 post-train`: the stages of a recipe in turn, each measured, the last one as it is served.

A stage is a process of its own: `glm5 train`, `glm5 rl` or `glm5 quantize`, whose run resumes by itself. So a killed
command goes on with the stage in which it was, and the end is the same. A stage that is done is not repeated; what a
skill is measured with may change, and then it is measured again.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm5.common.atomic import atomic_write_json
from glm5.common.bounded import TABLES, read_bounded_text
from glm5.common.console import out as say
from glm5.common.errors import TrainingError
from glm5.common.extras import require
from glm5.config.post_train import PostTrainRecipe
from glm5.config.quantize import QuantizeConfig
from glm5.config.rl import RLRecipe
from glm5.config.step import NotNegative, Positive
from glm5.post_train.measure import held_out, measure
from glm5.post_train.needs import needs_of
from glm5.post_train.page import Results, live_table, write_post_train_page
from glm5.post_train.plan import Plan, Stage
from glm5.post_train.process import run_glm5
from glm5.post_train.served import measure_served
from glm5.train.state import locked, writing_to

PAGE = "report.html"


def post_train(recipe: PostTrainRecipe, tables: Sequence[Mapping[str, Any]], restart_from: str | None = None) -> bool:
    """Run a recipe to its end, or go on with it; returns whether the served model is within the margin of every skill's
    best stage. `tables`: the stages' recipes. Raises ConfigError before the first stage for what cannot be run,
    TrainingError that names the stage that ended, and KeyboardInterrupt after Ctrl-C, once its state is on disk."""
    for package in ("fastapi", "uvicorn"):  # a missing one should fail before the training
        require(package, "serve")
    plan = Plan(recipe, tables)
    with locked(plan.out):
        if restart_from is not None:
            # The last stage first: what is left after a kill never has a beginning that is older than it.
            for stage in reversed(plan.from_stage(restart_from)):
                stage.delete()
        plan.check()
        return _Run(plan).run()


class _Took(BaseModel):
    """STAGE.done.json."""

    seconds: NotNegative
    cpu_seconds: NotNegative
    peak_bytes: NotNegative
    size_bytes: NotNegative


class _Asked(BaseModel):
    """Besides what the evaluation says."""

    model_config = ConfigDict(extra="allow")
    seeds: dict[str, list[int]]


class _Found(BaseModel):
    """STAGE.skills.json."""

    asked: _Asked
    skills: dict[str, list[Annotated[float, Field(allow_inf_nan=False)] | None]]
    tokens: NotNegative
    seconds: Positive
    drafted: list[NotNegative]
    accepted: list[NotNegative]
    all_seconds: NotNegative
    cpu_seconds: NotNegative


class _Run:
    """What has been found so far of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.recipe, self.out = plan, plan.recipe, plan.out
        trained = [stage.recipe for stage in plan.stages if isinstance(stage.recipe, RLRecipe)]
        self.seeds = held_out(self.recipe, trained)
        self.asked = json.loads(self.recipe.evaluation.model_dump_json(exclude={"margin"})) | {"seeds": self.seeds}
        seconds = {name: needs.seconds for name, needs in needs_of(plan).items()}
        self.results = Results(self.recipe, seconds)

    def run(self) -> bool:
        self.plan.show()
        for stage in self.plan.stages:
            stage.begin()
            done = _read(stage.done_file, _Took)
            if done is None:
                self._say(stage.name)
                done = run_stage(stage)
                _keep(stage.done_file, done)
            self.results.took[stage.name] = done
            if stage is self.plan.stages[-1]:
                make = partial(measure_served, self.recipe, stage.checkpoint, self.seeds, self.out / "server.log")
            else:
                is_quantized = isinstance(stage.recipe, QuantizeConfig)
                make = partial(measure, self.recipe, stage.checkpoint, self.seeds, is_quantized=is_quantized)
            if stage.is_policy:
                self.results.measured[stage.name] = self._measured(stage.skills_file, make)
        self._say(None)
        page = self.out / PAGE
        with writing_to(page):
            write_post_train_page(page, self.results)
        say(f"report: {page}\nserve it: glm5 serve {self.plan.stages[-1].checkpoint}")
        return self.results.is_within

    def _measured(self, file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found = _read(file, _Found)
        if found is not None and {name: len(of) for name, of in found["skills"].items()} != {
            name: len(of) for name, of in found["asked"]["seeds"].items()
        }:
            raise _damaged(file, "other tasks than were asked")
        if found is None or found["asked"] != self.asked:
            before, began = _cpu_seconds(), time.monotonic()
            found = make() | {"asked": self.asked}
            found |= {"all_seconds": time.monotonic() - began, "cpu_seconds": _cpu_seconds() - before}
            _keep(file, found)
        return found

    def _say(self, running: str | None) -> None:
        say(f"\n{live_table(self.results, running)}\n", flush=True)


def run_stage(stage: Stage) -> dict[str, Any]:
    """Run a stage's command to its end; returns what it took, and the size of its checkpoint. Raises TrainingError and
    KeyboardInterrupt."""
    took = {"seconds": 0.0, "cpu_seconds": 0.0, "peak_bytes": 0}
    # Quantization refuses a folder that it has finished.
    if not (isinstance(stage.recipe, QuantizeConfig) and (stage.made / "config.json").exists()):
        took = run_glm5(stage.command, f"stage {stage.name} (glm5 {stage.kind})")
    with writing_to(stage.checkpoint):
        stage.link()
    files = stage.checkpoint.glob("*.safetensors")
    return took | {"size_bytes": sum(file.stat().st_size for file in files)}


def _keep(file: Path, made: Mapping[str, Any]) -> None:
    with writing_to(file):
        atomic_write_json(file, made)


def _read(file: Path, kind: type[BaseModel]) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        return kind.model_validate_json(read_bounded_text(file, TABLES, TrainingError)).model_dump()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _damaged(file, ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")) from None
    except ValueError as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, why: object) -> TrainingError:
    return TrainingError(f"{file}: cannot be understood ({why}); delete it, and the same command goes on")


def _cpu_seconds() -> float:
    """Of this process and those that it has waited for."""
    found = (getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)
