"""What a run needs, by its recipe: the model, its tokenizer and template, the engine that samples it."""

import logging
import shutil
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer, train_bpe
from glm5.checkpoint.dense_mla import config_to_train
from glm5.checkpoint.resolve import resolve
from glm5.checkpoint.versions import WeightFiles, WeightFolder
from glm5.common.errors import ConfigError
from glm5.config.quantize import QuantizeConfig
from glm5.config.rl import RLRecipe, TeacherSection
from glm5.engine import AsyncEngine
from glm5.engine.cache.kv_cache import PAGE_SIZE
from glm5.model.glm5 import Glm5
from glm5.quantize.recipe import as_they_are
from glm5.quantize.run import quantize
from glm5.rl.environments.protocol import Environment
from glm5.rl.environments.table import make
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.engines import Engines
from glm5.rl.rollouts.ring import BALANCE
from glm5.rl.rollouts.teachers import Teachers
from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.choice import choose_backend
from glm5.rl.shown import ShownGames
from glm5.rl.tasks import TaskSource
from glm5.train.build import TEMPLATE, build_model, model_config, with_tokenizer
from glm5.train.state import writing_to

logger = logging.getLogger(__name__)

_GIB = 2**30


Launcher = Callable[[str], Sequence[str]]
"""For a process that computes on a device, a command in place of Python by which it runs on another machine
(common/elsewhere.py); none for this machine."""


def here(_device: str) -> Sequence[str]:
    """The `Launcher` of processes of this machine."""
    return ()


class PolicyBuilder:
    """The parts of a run. `out`: its folder. `launcher`: of engines. Raises ConfigError and CheckpointError."""

    def __init__(self, recipe: RLRecipe, out: Path, launcher: Launcher = here) -> None:
        self.recipe, self.out, self._launcher = recipe, out, launcher
        self.environments = environments_of(recipe)
        self.tasks = TaskSource(recipe, self.environments)
        check_teachers(recipe)
        self.assets = self._assets()
        self.tokenizer = Tokenizer.from_dir(self.assets)
        self.template = ChatTemplate.for_checkpoint(self.assets, tokenizer=self.tokenizer)
        self.chat = TokenChat(self.template, enable_thinking=recipe.rollouts.enable_thinking)
        self.cfg = with_tokenizer(model_config(recipe.model), recipe.model, self.tokenizer)
        if self.tokenizer.vocab_size > self.cfg.vocab_size:
            raise ConfigError(
                f"model: the tokenizer has {self.tokenizer.vocab_size} tokens; allowed: up to the model's vocab_size "
                f"{self.cfg.vocab_size}"
            )

    def model(self, device: torch.device) -> Glm5:
        """The model that the run begins with, in train mode."""
        return build_model(self.recipe.model, self.cfg, self.recipe.seed, device)

    def weight_files(self) -> WeightFolder | None:
        """Weights for the engines as files, if the recipe says so. Versions in the folder are deleted."""
        folder = weight_folder(self.recipe, self.out)
        return None if folder is None else WeightFolder(folder, deltas=self.recipe.rollouts.weight_channel == "delta")

    def engines(self, folder: Path, device: torch.device, files: WeightFiles | None) -> Engines:
        """One on each of `rollouts.devices`, by default on the trainer's, over the checkpoint in `folder`, quantized as
        the recipe says. None has started. `files`: by which weights reach them, if by files."""
        devices = self.recipe.rollouts.devices or (str(device),)
        if self.recipe.rollouts.quantization is not None:
            folder = self._quantized(folder, device)
        channel = self.recipe.rollouts.weight_channel
        return Engines(
            lambda number: self._engine(folder, devices[number], len(devices)),
            len(devices),
            channel="auto" if channel in ("folder", "delta") else channel,
            files=files,
        )

    def _engine(self, folder: Path, device: str, count: int) -> AsyncEngine:
        """An engine, one of `count`, in a process of its own over the checkpoint in `folder`."""
        cfg, at_once = self.recipe.rollouts, num_rollouts(self.recipe)
        pages = num_pages(self.recipe, count) if device == "cpu" and cfg.kv_cache_gb is None else None
        return AsyncEngine(
            folder,
            **self._common(device),
            max_model_len=cfg.max_model_len,
            max_num_seqs=at_once,
            max_num_batched_tokens=max(at_once, 2048),
            num_speculative_tokens=cfg.num_speculative_tokens,
            num_gpu_blocks_override=pages,
            kv_cache_memory_bytes=None if cfg.kv_cache_gb is None else int(cfg.kv_cache_gb * _GIB),
        )

    def teachers(self, device: torch.device) -> Teachers:
        """Those of the recipe, on the engines' devices in turn. None has started."""
        recipe = self.recipe
        devices = recipe.rollouts.devices or (str(device),)
        numbers = {one.name: number for number, one in enumerate(recipe.teacher)}

        def make(teacher: TeacherSection) -> AsyncEngine:
            return AsyncEngine(
                resolve(teacher.checkpoint),
                **self._common(devices[numbers[teacher.name] % len(devices)]),
                max_model_len=recipe.rollouts.max_model_len + 1,  # a token is sampled after what is scored
                max_num_seqs=num_scored(recipe),
                num_gpu_blocks_override=num_teacher_pages(recipe),
                max_logprobs=recipe.algorithm.teacher_top_k,
            )

        of = {self.environments[name].name: one for one in recipe.teacher for name in one.environments}
        return Teachers(of, make, recipe.algorithm.teacher_top_k)

    def _common(self, device: str) -> dict[str, Any]:
        """Settings of every engine."""
        cfg = self.recipe.rollouts
        return {
            "device": device,
            "launch": self._launcher(device),
            "deterministic": cfg.deterministic,
            "watchdog_timeout": cfg.watchdog_timeout,
            "num_threads": threads_of(self.recipe, torch.device(device)),
        }

    def _quantized(self, folder: Path, device: torch.device) -> Path:
        """The checkpoint in `folder` in the format of rollouts, which later pushes keep."""
        out, scheme = self.out / "quantized", self.recipe.rollouts.quantization
        with writing_to(out):
            shutil.rmtree(out, ignore_errors=True)
        settings = QuantizeConfig(
            model=str(folder),
            out=str(out),
            scheme=scheme,
            method=None if scheme == "fp8" else "minmax",
            device=str(device),
            held_out_tokens=0,
            restart=True,
        )
        return quantize(settings, resolved=as_they_are(settings))

    def sandbox(self, *, unsafe_local: bool) -> Backend | None:
        """What boxes are made of; None where no task runs what the policy writes. Raises ConfigError where one would at
        once, and no box can be had; where only later levels of a ladder do, their rollouts will be left out."""
        boxed = {one.name: self.environments[one.name].sandbox_levels for one in self.recipe.environment}
        first = {name: tasks.levels for name, tasks in self.tasks.sections.items()}
        sections = [one for one in self.recipe.environment if first[one.name] & set(boxed[one.name])]
        climbing = [
            one for one in self.recipe.environment if one.ladder and max(boxed[one.name], default=0) > one.level
        ]
        if not sections and not climbing:
            return None
        try:
            backend = choose_backend(unsafe_local=unsafe_local)
        except ConfigError as error:
            if sections:
                raise ConfigError(f"environment {sections[0].name}: {error}") from None
            logger.warning("levels of %s that run programs are left out: %s", climbing[0].name, error)
            return None
        logger.warning("%s", backend.notice)
        return backend

    def _assets(self) -> Path:
        section = self.recipe.model
        if section.tokenizer is not None or section.checkpoint is not None:
            folder = resolve(section.tokenizer or section.checkpoint or "")
            if not (folder / "tokenizer.json").is_file():
                raise ConfigError(
                    f"model: {folder} has no tokenizer.json; allowed: model.tokenizer = a folder with one"
                )
            return folder
        folder = self.out / "tokenizer"
        if not (folder / "tokenizer.json").is_file():
            shown, template = ShownGames(self.recipe, self.environments, self.tasks), ChatTemplate.bundled(TEMPLATE)
            tokenizer = train_bpe(shown.texts(template), section.architecture().vocab_size, section.digits_per_token)
            with writing_to(folder):
                tokenizer.save(folder, chat_template=template.source)
            logger.info("learnt a tokenizer of %d tokens", tokenizer.vocab_size)
        return folder


def check_teachers(recipe: RLRecipe) -> None:
    """ConfigError for a teacher whose tokens mean something else than the policy's."""
    if not recipe.teacher:
        return
    section = recipe.model
    own, cfg = Tokenizer.from_dir(resolve(section.tokenizer or section.checkpoint or "")), model_config(section)
    for one in recipe.teacher:
        folder = resolve(one.checkpoint)
        difference = own.first_difference(Tokenizer.from_dir(folder))
        if difference is None and (size := config_to_train(folder, {}).vocab_size) != cfg.vocab_size:
            difference = f"the vocabulary has {cfg.vocab_size} tokens here and {size} there"
        if difference is not None:
            raise ConfigError(
                f"teacher {one.name}: {folder} has another tokenizer than the policy: {difference}; allowed: "
                "checkpoints with the policy's tokenizer, since probabilities of other tokens cannot be compared"
            )


def weight_folder(recipe: RLRecipe, out: Path) -> Path | None:
    """Where weights go to the engines as files; None where they go by another channel."""
    if recipe.rollouts.weight_channel not in ("folder", "delta"):
        return None
    return Path(recipe.rollouts.weight_folder or out / "weights")


def environments_of(recipe: RLRecipe) -> dict[str, Environment]:
    """The environments of a recipe by name. Raises ConfigError."""
    found = {one.name: make(one.name) for one in recipe.environment}
    section_of = dict[str, str]()
    for section, environment in found.items():
        if (other := section_of.setdefault(environment.name, section)) != section:
            raise ConfigError(
                f"environments {other} and {section}: both call their tasks {environment.name}; leave one out, or "
                "rename the folder of one"
            )
    for one in recipe.environment:
        if one.level >= (levels := found[one.name].levels):
            raise ConfigError(f"environment {one.name}: level: got {one.level}; allowed: 0 to {levels - 1}")
    return found


def threads_of(recipe: RLRecipe, device: torch.device) -> int | None:
    """Threads of the engine, and on a CPU of the trainer; None: the engine's default."""
    return recipe.threads or (1 if device.type == "cpu" else None)


def num_rollouts(recipe: RLRecipe) -> int:
    """Rollouts that are under way at a time. Asynchronous ones may be more than those of a step."""
    cfg = recipe.rollouts
    of_step = cfg.groups * cfg.group_size
    if recipe.asynchronous is not None:
        return min(cfg.concurrency or of_step, 1024)
    return min(of_step, cfg.concurrency or 512, 1024)


def num_scored(recipe: RLRecipe) -> int:
    """Conversations that a teacher scores at a time."""
    return min(num_rollouts(recipe), 64)


def num_teacher_pages(recipe: RLRecipe) -> int:
    """Pages of a teacher's KV cache: of the conversations that it scores at a time."""
    return num_scored(recipe) * -(-(recipe.rollouts.max_model_len + 1) // PAGE_SIZE)


def num_pages(recipe: RLRecipe, num_engines: int) -> int:
    """Pages of the KV cache of one of so many engines that hold its conversations that are under way, and one more of
    each."""
    return ceil(
        num_rollouts(recipe) * (-(-recipe.rollouts.max_model_len // PAGE_SIZE) + 1) * min(1, BALANCE / num_engines)
    )
