"""The stages of a recipe as recipes of existing commands. A stage's files, within the folder of the run:

NAME.toml         its recipe, as its command reads it
NAME/             the folder of that command's run (of quantize: the checkpoint)
NAME.done.json    what the stage took; there once it is done
NAME.skills.json  the reward of every held-out task

shown/            conversations, named by what they are of, so that other ones are another recipe
"""

import hashlib
import json
import logging
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pydantic import ValidationError

from glm5.common.atomic import atomic_write
from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import ConfigError, TrainingError
from glm5.config.post_train import PostTrainRecipe, ShownSection, StageSection, resolved
from glm5.config.quantize import QuantizeConfig
from glm5.config.refusal import first_error, refuse
from glm5.config.rl import RLRecipe
from glm5.config.toml import checked, toml_of
from glm5.config.train import Recipe
from glm5.rl.environments.play import play_randomly, play_solution
from glm5.rl.environments.protocol import Comparing, EpisodeFailed, Task
from glm5.rl.environments.table import make
from glm5.train.state import first_difference, writing_to

logger = logging.getLogger(__name__)

StageRecipe = Recipe | RLRecipe | QuantizeConfig


@dataclass(frozen=True)
class Stage:
    """A stage and its files. `recipe`: what its command will read; `table`: the same as it is written."""

    section: StageSection
    out: Path
    table: Mapping[str, Any]
    recipe: StageRecipe

    @property
    def name(self) -> str:
        return self.section.name

    @property
    def kind(self) -> str:
        return self.section.kind

    @property
    def is_policy(self) -> bool:
        """Whether its checkpoint answers; a reward model's does not."""
        return not (isinstance(self.recipe, Recipe) and self.recipe.stage[-1].kind == "reward")

    @property
    def file(self) -> Path:
        return self.out / f"{self.name}.toml"

    @property
    def folder(self) -> Path:
        return self.out / self.name

    @property
    def done_file(self) -> Path:
        return self.out / f"{self.name}.done.json"

    @property
    def skills_file(self) -> Path:
        return self.out / f"{self.name}.skills.json"

    @property
    def checkpoint(self) -> Path:
        """A link to the checkpoint that it makes."""
        return self.out / f"{self.name}.checkpoint"

    @property
    def made(self) -> Path:
        """The folder of that checkpoint, once it is done: which one is best is not known before."""
        if isinstance(self.recipe, Recipe):
            last = self.folder / self.recipe.stage[-1].name
            return last / "best" if (last / "best").exists() else last / "last"
        return self.folder / "policy" if isinstance(self.recipe, RLRecipe) else self.folder

    def link(self) -> None:
        """Let `checkpoint` lead to what was made."""
        self.checkpoint.unlink(missing_ok=True)
        self.checkpoint.symlink_to(self.made.relative_to(self.out))

    @property
    def command(self) -> list[str]:
        """The arguments of glm5."""
        if not isinstance(self.recipe, QuantizeConfig):
            return [self.kind, str(self.file)]
        given = self.recipe.model_dump(mode="json", exclude_unset=True, exclude={"model", "out"})
        flags = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in given.items()]
        return ["quantize", self.recipe.model, str(self.folder), *flags]

    def delete(self) -> None:
        """Delete all that it has made."""
        for file in (self.done_file, self.skills_file, self.file, self.checkpoint):
            file.unlink(missing_ok=True)
        for folder in (self.folder, self.out / f".{self.name}.quantizing"):
            shutil.rmtree(folder, ignore_errors=True)

    def begin(self) -> None:
        """Write the recipe. TrainingError where the stage was begun with another one."""
        if self.file.exists():
            try:
                before = tomllib.loads(read_bounded_text(self.file, SETTINGS, TrainingError))
            except (ValueError, RecursionError) as error:
                raise TrainingError(
                    f"{self.file}: cannot be understood ({error}); put it back, or redo the stage and what follows "
                    f"with --restart-from {self.name}"
                ) from None
            if difference := first_difference(before, dict(self.table)):
                raise TrainingError(
                    f"stage {self.name} was begun with another recipe: {difference}; go on with the old one, choose "
                    f"another out, or redo it and what follows with --restart-from {self.name}"
                )
            return
        with writing_to(self.file):
            self.out.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.file) as handle:
                handle.writelines(f"{key} = {toml_of(value)}\n" for key, value in self.table.items())


class Plan:
    """The stages of a recipe in the order in which they run. Raises ConfigError for a stage whose recipe its command
    would refuse, and for an environment that is not there."""

    def __init__(self, recipe: PostTrainRecipe, tables: Sequence[Mapping[str, Any]]) -> None:
        self.recipe, self.out = recipe, recipe.folder
        self.stages = list[Stage]()
        for section, table in zip(recipe.stage, tables, strict=True):
            self.stages.append(self._stage(section, table))
            start = recipe.start_of(section)
            if start is not None and not self.stage(start).is_policy:
                raise ConfigError(f"stage {section.name}: start: {start} is a reward model; allowed: a stage before it")
            self._check_reward(self.stages[-1])
        if not self.stages[-1].is_policy:
            raise ConfigError(f"stage {self.stages[-1].name}: a reward model is not served; add a stage behind it")
        trained = [
            one for stage in self.stages if isinstance(stage.recipe, RLRecipe) for one in stage.recipe.environment
        ]
        for name in dict.fromkeys(
            [*(one.environment for one in (*recipe.shown, *recipe.skill)), *(one.name for one in trained)]
        ):
            make(name)

    def _check_reward(self, stage: Stage) -> None:
        """ConfigError where a stage is rewarded by one that is no reward model: else it is said once that has run."""
        reward = stage.recipe.reward if isinstance(stage.recipe, RLRecipe) else None
        for folder in () if reward is None else reward.folders:
            if any(folder == str(one.checkpoint) and one.is_policy for one in self.stages):
                name = Path(folder).stem
                raise ConfigError(f"stage {stage.name}: reward: {name} is no reward model; allowed: one of kind reward")

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def from_stage(self, name: str) -> list[Stage]:
        """That stage and those after it. ConfigError if there is none."""
        names = [stage.name for stage in self.stages]
        if name not in names:
            raise ConfigError(f"--restart-from: no stage is called {name!r:.80}; known are {', '.join(names)}")
        return self.stages[names.index(name) :]

    def check(self) -> None:
        """Refuse a stage that was begun with another recipe, before any runs."""
        for stage in self.stages:
            if stage.file.exists():
                stage.begin()

    def show(self) -> None:
        """Write the conversations of [[shown]] that are not there yet."""
        for section in self.recipe.shown:
            if not self._shown(section, "txt").exists():
                write_conversations(section, self._shown(section, "jsonl"), self._shown(section, "txt"))

    def _shown(self, section: ShownSection, ending: str) -> Path:
        digest = hashlib.sha256(section.model_dump_json().encode()).hexdigest()[:8]
        return self.out / "shown" / f"{section.name}-{digest}.{ending}"

    def _stage(self, section: StageSection, given: Mapping[str, Any]) -> Stage:
        def path_of(kind: str, name: str) -> str:
            if kind == "stage":
                return str(self.stage(name).checkpoint)
            stem, _, ending = name.rpartition(".")
            file = self._shown(next(one for one in self.recipe.shown if one.name == stem), ending)
            # `glm5 train` looks beside its recipe first.
            return str(file.relative_to(self.out) if section.kind == "train" else file)

        start, table = self.recipe.start_of(section), dict(resolved(given, path_of))
        where, table["out"] = f"stage {section.name}", str(self.out / section.name)
        if section.kind == "quantize":
            assert start is not None
            table["model"] = str(self.stage(start).checkpoint)
            try:
                return Stage(section, self.out, table, QuantizeConfig.model_validate(table))
            except ValidationError as error:
                path, value, allowed = first_error(error)
                raise ConfigError(f"{where}: {refuse('.'.join(path) or 'recipe', value, allowed)}") from None
        # A model that is no table is left there, for the command's own refusal.
        if start is not None and isinstance(model := table.get("model", {}), dict):
            kept = {key: value for key, value in model.items() if key in ("dtype", "compute")}
            table["model"] = {"checkpoint": str(self.stage(start).checkpoint), **kept}
        table.setdefault("name", section.name)
        return Stage(section, self.out, table, checked(table, where, Recipe if section.kind == "train" else RLRecipe))


def write_conversations(section: ShownSection, file: Path, text_file: Path) -> None:
    """Conversations for `glm5 train`, and their texts. ConfigError for an environment that has none such."""
    environment = make(section.environment)
    if section.level >= environment.levels:
        levels = environment.levels - 1
        raise ConfigError(f"shown {section.name}: level: got {section.level}; allowed: 0 to {levels}")
    for kind, needed in (("random", "random_reply"), ("pairs", "prefers")):
        if section.replies == kind and not hasattr(environment, needed):
            raise ConfigError(f"shown {section.name}: {section.environment} has no {needed}; allowed: solutions")
    rows, texts = list[str](), dict[str, None]()
    for seed in range(section.first_task, section.first_task + section.conversations):
        task = environment.task(seed, section.level)
        if section.replies == "pairs":
            if pair := _pair(environment, task, Random(seed)):  # pyright: ignore[reportArgumentType]
                rows.append(json.dumps(pair, ensure_ascii=False) + "\n")
                texts |= dict.fromkeys([str(task.messages[-1]["content"]), pair["chosen"], pair["rejected"]])
            continue
        try:
            if section.replies == "random":
                chats = play_randomly(environment, task, Random(seed)).conversations  # pyright: ignore[reportArgumentType]
            else:
                chats = play_solution(environment, task)
        except EpisodeFailed as failure:
            raise ConfigError(f"shown {section.name}: level {section.level}: {failure.reason}") from None
        for messages in chats:
            row = {"messages": [dict(one) for one in messages], "tools": list(task.tools), "thinking": "off"}
            rows.append(json.dumps(row, ensure_ascii=False) + "\n")
            texts |= dict.fromkeys(str(one.get("content") or "") for one in messages)
    with writing_to(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        for place, lines in ((file, rows), (text_file, [f"{text}\n" for text in texts])):
            with atomic_write(place) as handle:
                handle.writelines(lines)


def _pair(environment: Comparing, task: Task, random: Random) -> dict[str, Any] | None:
    """Two random replies to a task as a row of `chosen` and `rejected`; None where both are equal."""
    one, other = (environment.random_reply(task, random, "").content for _ in range(2))
    if one == other:
        return None
    chosen, rejected = (one, other) if environment.prefers(task, one, other, random) else (other, one)
    return {"prompt": list(task.messages), "chosen": chosen, "rejected": rejected, "thinking": "off"}
