"""A recipe of post-training, which `glm5 post-train RECIPE.toml` reads: stages, each begun with another's checkpoint.

    [[shown]]        conversations of an environment, as a file that stages train on
    [[stage]]        a recipe of `glm5 train`, `glm5 rl` or `glm5 quantize`: a file, or a table here
    [[skill]]        an environment, on whose held-out tasks every stage is measured
    [evaluation]     how

In a stage's recipe the value "stage:NAME" stands for the checkpoint of an earlier stage, and "shown:NAME.jsonl" and
"shown:NAME.txt" for the conversations of a [[shown]] and their text alone, from which a tokenizer is learnt.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import ConfigError
from glm5.config.command import Command, Positional
from glm5.config.rl import Rollouts
from glm5.config.step import Positive, Section
from glm5.config.toml import read_toml
from glm5.config.train import Name, Place, Workers

StageKind = Literal["train", "rl", "quantize"]
_REFERENCE = re.compile(r"(stage|shown):(.*)")
_FILES = ("files", "tokenizer_files", "path", "tasks_file", "recipe", "calibration", "held_out", "file", "folder")
"""Keys of recipes that name files, which are looked for beside the recipe first."""
_NO_FILES = {"calibration": "generated", "folder": r"[\w.-]+/[\w.-]+", "held_out": r"[\w.-]+/[\w.-]+"}
"""What may stand there without being a file: of two keys an id on the Hugging Face hub."""


class PostTrainConfig(Command):
    """Post-train a model in stages, by a recipe, up to a served checkpoint. The same command resumes an interrupted
    run."""

    recipe: Annotated[str, Positional()]
    """TOML file."""
    set: tuple[str, ...] = ()
    """KEY=VALUE: a value of the recipe by its path, such as evaluation.tasks=500."""
    dry_run: bool = False
    """Print what each stage needs in memory and time; train nothing."""
    restart_from: str | None = None
    """Delete what this stage and those after it have made, and go on from there."""


class ShownSection(Section):
    """Conversations of an environment."""

    name: Name
    environment: Annotated[str, Field(min_length=1, max_length=200)]
    """A name that docs/rl-environments.md lists, or package.module:name."""
    level: Annotated[int, Field(ge=0, le=1000)] = 0
    conversations: Annotated[int, Field(ge=1, le=10**6)]
    first_task: Annotated[int, Field(ge=0, lt=2**39)] = 0
    """Seed of the first one; the others have the seeds after it."""
    replies: Literal["solutions", "random", "pairs"] = "solutions"
    """random: random ones, which teach the form of replies alone. pairs: two random ones to a task, as a row of chosen
    and rejected, for a reward model; of an environment that says which one people prefer (`prefers`)."""


class StageSection(Section):
    """A stage: a recipe of an existing command, and where it begins."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=40)]
    kind: StageKind
    """The command."""
    recipe: Place | dict[str, Any]
    """A file, looked for beside this recipe, or a table; of quantize, its flags. Whatever it says of out, and of the
    model where the stage has a start, is replaced."""
    start: str | None = None
    """The stage whose checkpoint is the start. Default: the one before; the first one begins with its own model."""


class SkillSection(Section):
    """Tasks of an environment. Each is a question: the mean reward is the skill, or that of the metric `true` of an
    environment whose reward is not what is wanted."""

    environment: Annotated[str, Field(min_length=1, max_length=200)]
    level: Annotated[int, Field(ge=0, le=1000)] = 0

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.environment.rpartition(":")[2]


class EvaluationSection(Section):
    """How skills are measured: by the engine in its deterministic mode, on tasks that no stage has trained on."""

    tasks: Annotated[int, Field(ge=1, le=10**5)] = 2000
    """Of each skill; fewer where the environment has no more different ones."""
    greedy: bool = True
    """The likeliest tokens. Otherwise a reply to each is sampled, as the rollouts say."""
    margin: Positive = 0.03
    """Reward that the served model may have less than the best stage, interval included."""
    rollouts: Rollouts = Rollouts()
    """Lengths, drafts and sampling, as in recipes of `glm5 rl`."""


class PostTrainRecipe(Section):
    """A whole run."""

    name: Name
    out: Place | None = None
    """Folder of the run. Default: runs/NAME."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")] = "auto"
    """Of measurements and of the server; each stage's recipe has its own."""
    threads: Workers | None = None
    """Of the engine. Default: 1 on a CPU."""
    shown: tuple[ShownSection, ...] = ()
    stage: Annotated[tuple[StageSection, ...], Field(min_length=1)]
    skill: Annotated[tuple[SkillSection, ...], Field(min_length=1)]
    evaluation: EvaluationSection = EvaluationSection()

    @property
    def folder(self) -> Path:
        return Path(self.out if self.out is not None else f"runs/{self.name}")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for what, names in (
            ("stages are", [one.name for one in self.stage]),
            ("[[shown]] are", [one.name for one in self.shown]),
            ("skills are", [one.environment for one in self.skill]),
        ):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"two {what} called {twice[0]}")
        for number, stage in enumerate(self.stage):
            if stage.start is not None:
                self.must_precede(number, stage.start, "start: ")
            if stage.name == "shown":
                raise ValueError("stage shown: the folder of [[shown]] has this name; allowed: any other")
            if number == 0 and stage.kind == "quantize":
                raise ValueError(f"stage {stage.name}: quantize needs a stage before it")
        if self.evaluation.rollouts.max_tokens >= self.evaluation.rollouts.max_model_len:
            raise ValueError("evaluation.rollouts: max_tokens must be below max_model_len")
        return self

    def must_precede(self, number: int, name: str, before: str) -> None:
        """Refuse a stage that is not there yet when stage `number` begins. `before`: what stands before its name."""
        stage, earlier = self.stage[number], [one.name for one in self.stage[:number]]
        if name not in earlier:
            known = f"known before it are {', '.join(earlier)}" if earlier else "it is the first"
            what = "comes later, or is the stage itself" if name in {one.name for one in self.stage} else "is no stage"
            raise ValueError(f"stage {stage.name}: {before}{name:.80} {what}; {known}")

    def start_of(self, stage: StageSection) -> str | None:
        """The stage that one begins with; None: it begins with its own model."""
        number = self.stage.index(stage)
        return stage.start or (self.stage[number - 1].name if number else None)


def read_post_train(path: str | Path, settings: tuple[str, ...] = ()) -> tuple[PostTrainRecipe, list[dict[str, Any]]]:
    """The recipe of a file with `settings` (KEY=VALUE) over it, and the recipe of each stage as a table, with paths
    that hold from where the command runs; references stay. Raises ConfigError naming the file and the key, also for a
    file that a stage names and that is not there."""
    recipe = read_toml(path, settings, PostTrainRecipe)
    tables = [_table(stage, Path(path)) for stage in recipe.stage]
    for number, (stage, table) in enumerate(zip(recipe.stage, tables, strict=True)):
        for kind, name in _references(table):
            try:
                if kind == "stage":
                    recipe.must_precede(number, name, "stage:")
                elif not any(name in (f"{one.name}.jsonl", f"{one.name}.txt") for one in recipe.shown):
                    known = ", ".join(f"{one.name}.jsonl" for one in recipe.shown) or "none: there is no [[shown]]"
                    raise ValueError(f"stage {stage.name}: shown:{name:.80} is no file of a [[shown]]; known: {known}")
            except ValueError as error:
                raise ConfigError(f"{path}: {error}") from None
    return recipe, tables


def resolved(table: Any, path_of: Callable[[str, str], str]) -> Any:
    """The table with every reference replaced by `path_of(kind, name)`."""
    if isinstance(table, dict):
        return {key: resolved(value, path_of) for key, value in table.items()}
    if isinstance(table, list):
        return [resolved(value, path_of) for value in table]
    if isinstance(table, str) and (found := _REFERENCE.fullmatch(table)):
        return path_of(*found.groups())
    return table


def _references(table: Any) -> Iterator[tuple[str, str]]:
    found = list[tuple[str, str]]()
    resolved(table, lambda kind, name: found.append((kind, name)) or "")
    yield from found


def _table(stage: StageSection, recipe: Path) -> dict[str, Any]:
    beside, where = recipe.parent, f"{recipe}: stage {stage.name}"
    if not isinstance(stage.recipe, str):
        return _anchored(stage.recipe, beside, where)
    file = next((one for one in (beside / stage.recipe, Path(stage.recipe)) if one.is_file()), None)
    if file is None:
        raise ConfigError(f"{where}: recipe: {stage.recipe:.80}: no such file, neither in {beside} nor here")
    try:
        table = tomllib.loads(read_bounded_text(file, SETTINGS, ConfigError))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {file}: cannot be understood: {error}") from None
    return _anchored(table, file.parent, where)


def _anchored(table: Mapping[str, Any], beside: Path, where: str) -> dict[str, Any]:
    """The table with paths of files that lie beside a recipe as seen from where the command runs. ConfigError for a
    file that is in neither place: the stage would be refused only after those before it had run."""

    def path(value: Any, keys: list[str]) -> Any:
        if isinstance(value, list):
            return [path(one, keys) for one in value]
        if not isinstance(value, str) or _REFERENCE.fullmatch(value):
            return value
        if glob(str(beside / value), recursive=True):
            return str(beside / value)
        is_here = glob(str(Path(value).expanduser()), recursive=True)
        if not is_here and not re.fullmatch(_NO_FILES.get(keys[-1], ""), value):
            raise ConfigError(f"{where}: {'.'.join(keys)}: {value:.200}: no such file, neither in {beside} nor here")
        return value

    def walk(value: Any, keys: list[str]) -> Any:
        if isinstance(value, dict):
            return {name: walk(inner, [*keys, name]) for name, inner in value.items()}
        if keys[-1] in _FILES:
            return path(value, keys)
        return [walk(one, keys) for one in value] if isinstance(value, list) else value

    return {name: walk(inner, [name]) for name, inner in table.items()}
