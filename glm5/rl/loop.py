"""`glm5 rl`: rollouts, a training step, the new weights into the engine, and again.

    step:   groups of rollouts with the weights of version `step` -> repaired groups -> batches -> optimizer step
            -> weights of version `step` + 1 into the engine

Rollouts and trainer take turns on one device, or with `[asynchronous]` rollouts go on all the time (rl/orchestrator/),
and a batch is taken from those that have ended. Where they take turns, the tasks of a step, the seeds of all requests
and the learning rate depend only on the recipe and the step's number (with a ladder: also on earlier rewards, which are
in the state). In the engine's deterministic mode answers depend on nothing else, so a killed run goes on to the same
bits on a CPU. Asynchronous rollouts depend on time as well; a killed run asks the tasks again that were under way.
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.handover import TensorStream
from glm5.common.atomic import atomic_write
from glm5.common.errors import CheckpointError, EngineDead, ProcessEnded, TrainingError
from glm5.common.garbage import settled
from glm5.common.interrupt import noted_interrupt
from glm5.config.rl import RLRecipe
from glm5.kernels.current_device import current
from glm5.rl.build import Launcher, PolicyBuilder, here
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.evaluate import evaluate
from glm5.rl.figures import figures_of
from glm5.rl.orchestrator.rollouts import AsyncRollouts
from glm5.rl.predict import CALIBRATED, measured_profile, predicted
from glm5.rl.records.store import RecordWriter
from glm5.rl.report import REPORT, write_report
from glm5.rl.rewards.blend import Blend
from glm5.rl.rewards.scorer import FolderScorer
from glm5.rl.rollout import Group
from glm5.rl.rollouts.collect import AnyHarness, Draw, cause_of, collect
from glm5.rl.rollouts.engines import Engines
from glm5.rl.rollouts.harness import Harness
from glm5.rl.rollouts.policy import Policy
from glm5.rl.rollouts.program import Gateway, ProgramHarness
from glm5.rl.rollouts.refill import refilled
from glm5.rl.services import SERVICES, ServiceSettings, statistics
from glm5.rl.state import RunState
from glm5.rl.trainer import PolicyTrainer, Trained, arithmetic
from glm5.rl.trainer_processes import TrainerProcesses
from glm5.rl.training.policy import SPARSE
from glm5.rl.waits import EngineMeter, beside, episode_figures, in_words, is_predicted, measured, waited
from glm5.rl.watch import Watch, read_metrics
from glm5.train.metrics import flops_per_token
from glm5.train.stage_trainer import device_of
from glm5.train.state import locked, writing_to

logger = logging.getLogger(__name__)

T = TypeVar("T")

FINISHING = "the step is finished and the state written first; a second one ends the run at once"


OpenGateway = Callable[[ChatTemplate, Tokenizer], AbstractContextManager[Gateway]]


def run(
    recipe: RLRecipe,
    *,
    restart: bool = False,
    unsafe_local: bool = False,
    open_gateway: OpenGateway | None = None,
    launcher: Launcher = here,
) -> Path:
    """Run a recipe to its end, or go on with it; returns the folder of the trained policy. `unsafe_local`: where no
    sandbox can be had, what the policy writes runs without. `open_gateway`: the server that a recipe's agent asks.
    `launcher`: runs processes on other machines.

    Where a process of the trainer ends, the run goes on from its saved state, once from each. Raises KeyboardInterrupt
    after Ctrl-C, once the state is on disk.
    """
    out, device = recipe.folder, device_of(recipe.device)
    folder = Path(recipe.rollouts.weight_folder or out)
    with locked(out), nullcontext() if folder == out else locked(folder, "rollouts.weight_folder"):
        earlier = read_metrics(out)
        if restart:
            for name in ("state.pt", "metrics.jsonl", "recipe.json", REPORT, SERVICES):
                (out / name).unlink(missing_ok=True)
            for name in ("policy", "quantized", "tokenizer", "records"):
                shutil.rmtree(out / name, ignore_errors=True)
        with current(device), arithmetic(recipe, device):
            lost_at = -1
            while True:
                given = {"unsafe_local": unsafe_local, "open_gateway": open_gateway, "launcher": launcher}
                job = Run(recipe, out, device, earlier, **given)
                try:
                    return job.folder if job.is_done else asyncio.run(job.run())
                except (CheckpointError, TrainingError) as error:
                    if not job.trainer.has_ended or job.saved == lost_at:
                        raise
                    lost_at = job.saved
                    logger.warning("%s; it goes on from there", error)


class Run:
    """A run of a recipe. `earlier`: the lines of metrics of the one before it, or of its own earlier part."""

    def __init__(
        self,
        recipe: RLRecipe,
        out: Path,
        device: torch.device,
        earlier: Sequence[Mapping[str, Any]] = (),
        *,
        unsafe_local: bool,
        open_gateway: OpenGateway | None,
        launcher: Launcher = here,
    ) -> None:
        self.recipe, self.out, self.device, self.earlier, self.launcher = recipe, out, device, earlier, launcher
        self.state = RunState(out, recipe)
        self.records = RecordWriter(out, recipe.records.max_gb * 2**30, recipe.records.every)
        saved = self.state.read()
        self.builder = PolicyBuilder(recipe, out, launcher)
        self.folder = out / "policy"
        self.is_done = saved is not None and saved["step"] >= recipe.steps and self.folder.exists()
        if self.is_done:
            return
        self.sandbox = self.builder.sandbox(unsafe_local=unsafe_local)
        self.trainer = self._trainer()
        self.tasks = self.builder.tasks
        self.blend = None if recipe.reward is None else self._blend()
        self.number = self.saved = 0
        self.engines: Engines | None = None
        self.open_gateway = open_gateway
        self.teachers = self.builder.teachers(device)
        self.has_restarted, self.meter = False, EngineMeter()
        if saved is not None:
            self.number = self.saved = saved["step"]
            self.tasks.load_state(saved["ladders"])
            self.trainer.load_state(saved["trainer"])
            logger.info("going on after step %d", self.number)
        self.services = ServiceSettings(recipe, out)
        self.rollouts = None
        if recipe.asynchronous is not None:
            self.rollouts = AsyncRollouts(recipe, self.tasks, self.number, self.services)
            if saved is not None:
                self.rollouts.load_state(saved["asynchronous"])
        with writing_to(out), atomic_write(out / "recipe.json") as handle:
            handle.write(json.dumps(json.loads(recipe.model_dump_json()), indent=2) + "\n")
        if saved is None:
            self._begin()
        elif not self.number:
            self._save()  # the policy may be of a later step, whose state was not written any more

    def _trainer(self) -> PolicyTrainer | TrainerProcesses:
        devices = self.recipe.trainer.devices
        if not devices and self.recipe.asynchronous is None:
            return PolicyTrainer(self.recipe, self.builder, self.device)
        devices = devices or (str(self.device),)
        return TrainerProcesses(self.recipe, self.out, devices, self.launcher, self.builder.anchors)

    def _blend(self) -> Blend:
        return Blend(self.recipe, partial(FolderScorer, device=self.device), self.builder.anchors)

    def _begin(self) -> None:
        self.trainer.warm_up()
        self.trainer.begin()
        self._save()

    async def run(self) -> Path:
        """Run to the end; returns the folder of the policy."""
        names = [one.name for one in self.recipe.environment]
        launcher = partial(self.launcher, "cpu")
        workers = EnvironmentWorkers(names, num_workers=self.recipe.workers, sandbox=self.sandbox, launcher=launcher)
        async with workers as self.workers:
            watch = Watch(self.out, self.recipe, self.number)
            interrupts = noted_interrupt(FINISHING, watch.release)
            with watch as self.watch, interrupts as interrupted, self._gateway() as self.gateway:
                try:
                    await self._alive(self._push, is_dead=True)
                    self.is_predicted = self.rollouts is None or is_predicted(read_metrics(self.out))
                    await self._predict(self.earlier)
                    with settled():
                        await self._steps(interrupted)
                finally:
                    if self.rollouts is not None:
                        await self.rollouts.cancel()
                    if self.engines is not None:
                        await self.engines.close()
                    await self.teachers.close()
                    self.trainer.close()
        with writing_to(self.out / REPORT):
            write_report(self.out, self.recipe)
        lines = read_metrics(self.out)
        logger.info("%s", waited(lines))
        for name, found in statistics(lines).items():
            logger.info("%s: %s", name, ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
        if beside(lines):
            logger.info("measured: %s", in_words(measured(lines)))
        if interrupted:  # since its last step: the run is whole, and what would come after it is not wanted
            raise KeyboardInterrupt
        return self.folder

    async def _steps(self, interrupted: Sequence[Any]) -> None:
        if not self.number:
            await self._alive(self._evaluate)
        while self.number < self.recipe.steps:
            await self._step()
            is_last = self.number == self.recipe.steps
            if is_last or self.number % self.recipe.evaluation.every == 0:
                await self._alive(self._evaluate)
            if is_last or interrupted or self.number % self.recipe.records.state_every == 0:
                self.watch.release()
                self._save()
            if interrupted and not is_last:
                logger.warning("stopped after step %d; the same command goes on", self.number)
                raise KeyboardInterrupt

    async def _step(self) -> None:
        began = time.monotonic()
        groups = await self._alive(self._collect)
        rolled = time.monotonic()
        await self._alive(partial(self.teachers.score, groups))
        scored = time.monotonic()
        with self._naming_state():
            trained = await asyncio.to_thread(self._train, groups)
        stepped = time.monotonic()
        self.tasks.observe(groups)
        self.number += 1
        self.has_restarted = False
        await self._alive(self._push)
        stats = await self._alive(self._stats)
        pushed = time.monotonic()
        await asyncio.to_thread(self._record, groups, trained)
        waited = "rollout" if self.rollouts is None else "wait_for_batch"
        times = {waited: rolled - began, "train": stepped - scored, "push": pushed - stepped}
        times |= {"teachers": scored - rolled} if self.recipe.teacher else {}
        times["record"] = time.monotonic() - pushed
        version = self.recipe.version_at(self.number - 1)
        figures = figures_of(version, groups, trained, times) | self._speed(trained, times["train"])
        if self.pushed is not None:
            rate = self.pushed["bytes"] / 1e9 / self.pushed["seconds"]
            figures |= {"push/gb_s": rate, "push/stopped_s": self.pushed["stopped_seconds"]}
            figures["push/bytes"] = self.pushed["bytes"]
        figures["wait/trainer"] = times[waited] / figures["time/step"]
        figures |= self.meter.figures(stats) | self.services.figures()
        if self.rollouts is not None:
            figures |= self.rollouts.figures()
        else:
            figures |= episode_figures([one for group in groups for one in group.rollouts])
        if self.recipe.rollouts.devices:
            figures["engines/lost"] = self.harness.policy.engines.num_lost
        self.watch.step(self.number, figures)
        if not self.is_predicted and self.number % CALIBRATED == 0:
            await self._predict(read_metrics(self.out))

    async def _predict(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write down what the steps of an asynchronous run will be like, once there are some to go by."""
        if self.is_predicted or (profile := measured_profile(self.recipe, lines)) is None:
            return
        self.is_predicted, figures = True, await asyncio.to_thread(predicted, self.recipe, profile)
        self.watch.predicted(self.number, figures)
        logger.info("predicted: %s (%s)", in_words(figures), profile.source)

    async def _stats(self) -> list[dict[str, Any]]:
        return await self.harness.policy.engines.stats()

    def _train(self, groups: Sequence[Group]) -> Trained:
        with current(self.device):
            return self.trainer.train(groups, self.number)

    def _speed(self, trained: Trained, seconds: float) -> dict[str, float]:
        """Of training: tokens a second, context included; the share of the device's peak."""
        lengths = [len(one) for one in trained.scores.sequences]
        rate = sum(lengths) / max(seconds, 1e-9)
        found = {"perf/train_tok_s": rate}
        if self.recipe.peak_tflops is not None:
            flops = flops_per_token(self.builder.cfg, sum(lengths) // len(lengths), SPARSE)
            found["perf/mfu"] = flops * rate / (self.recipe.peak_tflops * 1e12)
        return found

    def _record(self, groups: Sequence[Group], trained: Trained) -> None:
        if self.records.keeps(self.number):
            columns = trained.scores.by_segment(groups)
            self.records.write(self.number, self.recipe.steps, self.trainer.digests(), groups, columns)

    async def _collect(self) -> list[Group]:
        if self.rollouts is not None:
            return await self.rollouts.batch(self.number)
        self.services.weigh(self.tasks.mixture, self.number * self.recipe.rollouts.groups)
        return await refilled(self._play, self.tasks, self.number)

    async def _play(self, draws: Sequence[Draw]) -> list[Group]:
        cfg, seed = self.recipe.rollouts, self.recipe.seed
        return await collect(self.harness, draws, cfg.group_size, run_seed=seed, concurrency=cfg.concurrency)

    async def _evaluate(self) -> None:
        cfg = self.recipe.evaluation
        policy = Policy(self.harness.policy.engines, self.recipe.rollouts, greedy=cfg.samples == 1)
        harness, found = self._harness(policy), dict[str, float]()
        harness.reward = None if self.blend is None else self.blend.measure
        for prefix, draws in self.tasks.evaluated().items():
            found |= await evaluate(harness, draws, cfg.samples, self.recipe.seed, prefix)
        self.watch.evaluated(self.number, found)

    def _due(self) -> tuple[int, Mapping[str, Tensor] | TensorStream]:
        """Version and weights with which the next step's rollouts are sampled."""
        return self.recipe.version_at(self.number), self.trainer.weights()

    async def _push(self) -> None:
        """The weights that are due into the engine, where it has those of an earlier version."""
        (version, weights), cfg = await asyncio.to_thread(self._due), self.recipe.asynchronous
        if self.version == version:
            return
        policy, age = ("recompute", 0) if cfg is None else (cfg.policy, cfg.max_key_age)
        engines = self.harness.policy.engines
        self.pushed = await engines.update_weights(weights, policy=policy, version=version, max_key_age=age)
        self.version = version
        if self.rollouts is not None:
            self.rollouts.pushed(version)

    async def _alive(self, action: Callable[[], Awaitable[T]], *, is_dead: bool = False) -> T:
        """Do what needs the engines. Where all have ended, they are started again with the current weights, once in a
        step. `is_dead`: they have not started yet."""
        while True:
            with self._naming_state():
                try:
                    if is_dead:
                        await self._start_engine()
                    return await action()
                except (EngineDead, ExceptionGroup) as error:
                    cause = cause_of(error)
                    if not isinstance(cause, EngineDead):
                        raise cause from error
                    if self.has_restarted:
                        raise TrainingError(
                            f"the engine was started again in this step and ended again: {cause}"
                        ) from error
            logger.warning("the engine ended: %s; it is started again with the weights of step %d", cause, self.number)
            is_dead = self.has_restarted = True

    @contextmanager
    def _naming_state(self) -> Iterator[None]:
        """Errors in the block say which step it is, and which state is saved."""
        try:
            yield
        except (CheckpointError, ProcessEnded, TrainingError) as error:
            raise TrainingError(
                f"step {self.number + 1}: {error}. The state of step {self.saved} is in {self.out}, and the same "
                "command goes on from it"
            ) from error

    async def _start_engine(self) -> None:
        if self.rollouts is not None:
            await self.rollouts.cancel()
        if self.engines is not None:
            await self.engines.close()
        self.engines = engines = await asyncio.to_thread(
            self.builder.engines, self.folder, self.device, self.trainer.files
        )
        await asyncio.to_thread(engines.start)
        for engine in engines.alive:
            await asyncio.to_thread(self.trainer.check, engine.info.arithmetic)
        cfg = self.recipe.asynchronous
        keeps_pages = cfg is not None and cfg.policy == "keep-session"
        self.harness = self._harness(Policy(engines, self.recipe.rollouts, keeps_pages=keeps_pages))
        self.harness.reward = None if self.blend is None else partial(self.blend.score, workers=self.workers)
        if self.rollouts is not None:
            self.rollouts.play_with(self.harness)
        self.version, self.pushed = 0, None
        await self._push()

    def _harness(self, policy: Policy) -> AnyHarness:
        if self.recipe.agent is None or self.gateway is None:
            return Harness(policy, self.workers, self.builder.chat)
        return ProgramHarness(policy, self.workers, self.builder.chat, self.gateway, self.recipe.agent)

    def _gateway(self) -> AbstractContextManager[Gateway | None]:
        if self.recipe.agent is None:
            return nullcontext()
        assert self.open_gateway is not None, "a recipe with an agent needs open_gateway"
        return self.open_gateway(self.builder.template, self.builder.tokenizer)

    def _save(self) -> None:
        rollouts = None if self.rollouts is None else self.rollouts.state()
        self.trainer.save(self.state, self.number, self.tasks.state(), rollouts)
        self.saved = self.number
        self.records.keep_state(self.state.file, self.number)
