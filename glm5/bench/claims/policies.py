"""Short runs of reinforcement learning on selected keys. An arm's word without "=" says what its indexers do:

keys           they learn in the warm start, by their KL to the policy's attention, and are frozen then
learnt-keys    they go on learning
unstable-keys  as keys; but the trainer reads, for a share SWAPPED of the selected keys, others that a query sees
"""

import asyncio
from contextlib import redirect_stderr
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from glm5.common.errors import GlmError
from glm5.config.rl import read_rl_recipe
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.model.seams import Selection
from glm5.rl.loop import Run
from glm5.rl.trainer import PolicyTrainer, arithmetic
from glm5.rl.training.policy import SPARSE, choose_parameters, policy_step
from glm5.rl.watch import FILE, read_lines
from glm5.train.batch import Batch
from glm5.train.optim.build import INDEXER
from glm5.train.step import Phase

SWAPPED = 0.25
LAST = 10
"""Steps whose mean reward counts."""
LEARN = Phase("sparse", learn_index=True)


def policy(recipe: str | None, settings: tuple[str, ...], seed: int, folder: Path) -> dict[str, float]:
    """`reward`: mean of the last steps, 0 where the run failed; `first`: of the first ones. `mismatch` and `entropy`:
    means."""
    assert recipe is not None, "the registry names one"
    (mark,) = (one for one in settings if "=" not in one)
    own = [f"out={folder}", f"seed={seed}", "records.every=0", "records.state_every=100000"]
    own += ["evaluation.every=100000", "evaluation.tasks=1", *(one for one in settings if "=" in one)]
    read, error = read_rl_recipe(recipe, tuple(own)), ""
    with (folder / "log.txt").open("w", encoding="utf-8") as log, redirect_stderr(log):
        try:
            with arithmetic(read, torch.device("cpu")):
                run = _KeysRun(read, folder, torch.device("cpu"), unsafe_local=False, open_gateway=None)
                run.trainer.later = LATER[mark]
                asyncio.run(run.run())
        except GlmError as failure:
            error = str(failure)
    steps = [line for line in read_lines(folder / FILE) if "reward/mean" in line]
    if not steps:
        raise GlmError(f"the run failed before its first step: {error}")
    rewards = [line["reward/mean"] for line in steps]
    found = {"reward": 0.0 if error else fmean(rewards[-LAST:]), "first": fmean(rewards[:LAST])}
    return found | {name: fmean(line[key] for line in steps) for name, key in KEPT.items()}


class _UnstableView(PackedView):
    def select(self, layer_idx: int, q_TJI: Tensor, w_TJ: Tensor, top_k: int, scale: float) -> Selection:
        keys_TK = super().select(layer_idx, q_TJI, w_TJ, top_k, scale).keys_TK
        return Selection(None if keys_TK is None else swapped(keys_TK, self.end_T))


def swapped(keys_TK: Tensor, end_T: Tensor) -> Tensor:
    """Keys of which a share is replaced by random ones before `end_T`, each at most once, ascending, then -1."""
    others_TK = (torch.rand(keys_TK.shape) * end_T[:, None]).int()
    new_TK = torch.where((torch.rand(keys_TK.shape) < SWAPPED) & (keys_TK >= 0), others_TK, keys_TK).sort(1).values
    large = torch.iinfo(torch.int32).max
    twice_TK = torch.zeros_like(new_TK, dtype=torch.bool)
    twice_TK[:, 1:] = new_TK[:, 1:] == new_TK[:, :-1]
    new_TK = new_TK.masked_fill(twice_TK | (new_TK < 0), large).sort(1).values
    return new_TK.masked_fill(new_TK == large, -1)


class _UnstablePhase(Phase):
    def view(self, batch: Batch, *, learning: bool = False) -> PackedView:
        return _UnstableView(batch.lengths, batch.ids_T.device)


LATER = {"keys": SPARSE, "learnt-keys": LEARN, "unstable-keys": _UnstablePhase("sparse")}
"""Passes of the trainer after the warm start."""
KEPT = {"mismatch": "kl/mismatch", "entropy": "entropy"}


class _KeysTrainer(PolicyTrainer):
    later: Phase = SPARSE

    def _build(self) -> None:
        self.model, self.masters = self.builder.model(self.device), None
        self.step = policy_step(self.model, self.objective, self.recipe.optimizer, choose=_with_indexers)
        self.step.phase = LEARN


class _KeysRun(Run):
    trainer: _KeysTrainer

    def _trainer(self) -> PolicyTrainer:
        torch.manual_seed(self.recipe.seed)
        return _KeysTrainer(self.recipe, self.builder, self.device)

    async def run(self) -> Path:
        self.trainer.step.phase = self.trainer.later
        if self.trainer.later is not LEARN:
            choose_parameters(self.trainer.model)
        return await super().run()


def _with_indexers(model: Glm5) -> None:
    choose_parameters(model)
    for name, weight in model.named_parameters():
        if INDEXER in name:
            weight.requires_grad_()
