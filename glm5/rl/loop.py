"""`glm5 rl`: rollouts, a training step, the new weights into the engine, and again.

    step:   groups of rollouts with the weights of version `step` -> repaired groups -> batches -> optimizer step
            -> weights of version `step` + 1 into the engine

Rollouts and trainer take turns on one device. The tasks of a step, the seeds of all requests and the learning rate
depend only on the recipe and the step's number (with a ladder: also on earlier rewards, which are in the state). In the
engine's deterministic mode answers depend on nothing else, so a killed run goes on to the same bits on a CPU.
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from glm5.checkpoint.save import save
from glm5.common.atomic import atomic_write
from glm5.common.errors import EngineDead, TrainingError
from glm5.common.interrupt import noted_interrupt
from glm5.config.rl import RLRecipe
from glm5.engine import AsyncEngine
from glm5.rl.build import PolicyBuilder
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.evaluate import evaluate
from glm5.rl.figures import figures_of
from glm5.rl.records.digest import digests
from glm5.rl.records.store import RecordWriter
from glm5.rl.report import REPORT, write_report
from glm5.rl.rollout import Group
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.collect import collect
from glm5.rl.rollouts.harness import Harness
from glm5.rl.rollouts.policy import Policy
from glm5.rl.state import RunState
from glm5.rl.tasks import TaskSource
from glm5.rl.trainer import PolicyTrainer, Trained, arithmetic
from glm5.rl.training.policy import SPARSE
from glm5.rl.watch import Watch
from glm5.train.metrics import flops_per_token, memory
from glm5.train.stage_trainer import device_of
from glm5.train.state import locked, writing_to

logger = logging.getLogger(__name__)

FINISHING = "the step is finished and the state written first; a second one ends the run at once"


def run(recipe: RLRecipe, *, restart: bool = False) -> Path:
    """Run a recipe to its end, or go on with it; returns the folder of the trained policy.

    Raises KeyboardInterrupt after Ctrl-C, once the state is on disk.
    """
    out, device = recipe.folder, device_of(recipe.device)
    with locked(out):
        if restart:
            for name in ("state.pt", "metrics.jsonl", "recipe.json", REPORT):
                (out / name).unlink(missing_ok=True)
            for name in ("policy", "tokenizer", "records"):
                shutil.rmtree(out / name, ignore_errors=True)
        with arithmetic(recipe, device):
            return asyncio.run(Run(recipe, out, device).run())


class Run:
    """A run of a recipe."""

    def __init__(self, recipe: RLRecipe, out: Path, device: torch.device) -> None:
        self.recipe, self.out, self.device = recipe, out, device
        self.state = RunState(out, recipe)
        self.records = RecordWriter(out, recipe.records.max_gb * 2**30, recipe.records.every)
        saved = self.state.read()
        self.builder = PolicyBuilder(recipe, out)
        self.trainer = PolicyTrainer(recipe, self.builder, device)
        self.tasks = TaskSource(recipe, self.builder.environments)
        self.number = 0
        if saved is not None:
            self.number = saved["step"]
            self.tasks.load_state(saved["ladders"])
            self.trainer.load_state(saved["trainer"])
            logger.info("going on after step %d", self.number)
        with writing_to(out), atomic_write(out / "recipe.json") as handle:
            handle.write(json.dumps(json.loads(recipe.model_dump_json()), indent=2) + "\n")

    async def run(self) -> Path:
        """Run to the end; returns the folder of the policy."""
        folder = self.out / "policy"
        if self.number >= self.recipe.steps and folder.exists():
            return folder
        if not self.state.file.exists():
            for number, losses in enumerate(self.trainer.warm_up(), start=1):
                if number % 20 == 0:
                    logger.info("warm start, step %d: cross-entropy %.4g", number, losses["ce"])
            self.trainer.begin()
            self._save()
        names = [one.name for one in self.recipe.environment]
        interrupts = noted_interrupt(FINISHING)
        async with EnvironmentWorkers(names, num_workers=self.recipe.workers) as self.workers:
            with Watch(self.out, self.recipe, self.number) as self.watch, interrupts as interrupted:
                await self._start_engine()
                try:
                    await self._steps(interrupted)
                finally:
                    await asyncio.to_thread(self.engine.close)
        with writing_to(self.out / REPORT):
            write_report(self.out, self.recipe)
        return folder

    async def _steps(self, interrupted: Sequence[Any]) -> None:
        if not self.number:
            await self._evaluate()
        while self.number < self.recipe.steps:
            await self._step()
            is_last = self.number == self.recipe.steps
            if is_last or self.number % self.recipe.evaluation.every == 0:
                await self._evaluate()
            if is_last or interrupted or self.number % self.recipe.records.state_every == 0:
                self.watch.release()
                self._save()
            if interrupted:
                logger.warning("stopped after step %d; the same command goes on", self.number)
                raise KeyboardInterrupt

    async def _step(self) -> None:
        began = time.monotonic()
        groups = await self._alive(self._collect)
        rolled = time.monotonic()
        trained = await asyncio.to_thread(self.trainer.train, groups, self.number)
        stepped = time.monotonic()
        self.tasks.observe(groups)
        self.number += 1
        await self._alive(self._push)
        pushed = time.monotonic()
        await asyncio.to_thread(self._record, groups, trained)
        times = {"rollout": rolled - began, "train": stepped - rolled, "push": pushed - stepped}
        times["record"] = time.monotonic() - pushed
        figures = figures_of(self.number, groups, trained, times) | self._speed(trained, times["train"])
        self.watch.step(self.number, figures)

    def _speed(self, trained: Trained, seconds: float) -> dict[str, float]:
        """Of training: tokens a second, context included; the share of the device's peak; GiB."""
        lengths = [len(one) for one in trained.scores.sequences]
        rate = sum(lengths) / max(seconds, 1e-9)
        found = {"perf/train_tok_s": rate, "perf/peak_gib": memory(self.device)}
        if self.recipe.peak_tflops is not None:
            flops = flops_per_token(self.builder.cfg, sum(lengths) // len(lengths), SPARSE)
            found["perf/mfu"] = flops * rate / (self.recipe.peak_tflops * 1e12)
        return found

    def _record(self, groups: Sequence[Group], trained: Trained) -> None:
        if self.records.keeps(self.number):
            columns = trained.scores.by_segment(groups)
            self.records.write(self.number, self.recipe.steps, digests(self.trainer.learnt()), groups, columns)

    async def _collect(self) -> list[Group]:
        cfg = self.recipe.rollouts
        draws = self.tasks.draws(self.number)
        return await collect(
            self.harness, draws, cfg.group_size, run_seed=self.recipe.seed, concurrency=cfg.concurrency
        )

    async def _evaluate(self) -> None:
        chat, cfg = self.harness.chat, self.recipe.evaluation
        policy = Policy(self.engine, self.recipe.rollouts, greedy=cfg.samples == 1)
        draws = self.tasks.held_out(cfg.tasks)
        found = await evaluate(Harness(policy, self.workers, chat), draws, cfg.samples, self.recipe.seed)
        self.watch.evaluated(self.number, found)

    async def _push(self) -> None:
        """The trainer's weights into the engine, as version `number`."""
        await self.engine.update_weights(self.trainer.weights(), policy="recompute", version=self.number)

    async def _alive(self, action: Any) -> Any:
        """Do what needs the engine. Where the engine dies, it is started again with the current weights, once."""
        try:
            return await action()
        except (EngineDead, ExceptionGroup) as error:
            causes = error.exceptions if isinstance(error, ExceptionGroup) else [error]
            dead = next((one for one in causes if isinstance(one, EngineDead)), None)
            if dead is None or self._has_restarted:
                raise TrainingError(f"{dead or error}; the same command goes on from the last state") from error
            logger.warning("the engine ended: %s; it is started again with the weights of step %d", dead, self.number)
            self._has_restarted = True
            await asyncio.to_thread(self.engine.close)
            await self._start_engine()
            return await action()

    async def _start_engine(self) -> None:
        self._has_restarted = getattr(self, "_has_restarted", False)
        self.engine: AsyncEngine = await asyncio.to_thread(self.builder.engine, self.out / "policy", self.device)
        self.engine.start()
        self.trainer.check(self.engine.info.arithmetic)
        chat = TokenChat(self.builder.template, enable_thinking=self.recipe.rollouts.enable_thinking)
        self.harness = Harness(Policy(self.engine, self.recipe.rollouts), self.workers, chat)
        if self.number:
            await self._push()

    def _save(self) -> None:
        with writing_to(self.out / "policy"):
            save(self.trainer.model, self.out / "policy", assets=self.builder.assets)
        self.state.write(self.number, self.tasks.state(), self.trainer.state())
        self.records.keep_state(self.state.file, self.number)
