"""One rank of a distributed run, and the report of the failed rank if it ends with an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistBackendError

from glm5.common.errors import GlmError, TrainingError
from glm5.config.train import Recipe
from glm5.train.build import Builder
from glm5.train.loop import Run, execution_settings
from glm5.train.parallel.lora import DistributedLora
from glm5.train.parallel.mesh import mesh_of
from glm5.train.parallel.trainer import DistributedTrainer
from glm5.train.parallel.training_group import TrainingGroup
from glm5.train.stage_trainer import device_of
from glm5.train.state import clear, locked

_PREPARE_TIMEOUT = timedelta(days=1)  # tokenizing on the first rank may take long
_ASK_TIMEOUT = timedelta(seconds=5)  # for all waiting ranks to report that they wait
_PEER_ERRORS = ("closed by peer", "Timed out", "timed out", "Connection reset", "remote worker")


@dataclass(frozen=True)
class Rank:
    """A launcher's settings for a process: torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    `has_store`: the launcher runs the TCPStore; else the first rank does.
    """

    rank: int
    world: int
    local: int
    address: str
    port: int
    has_store: bool

    def store(self) -> Store:
        is_master = self.rank == 0 and not self.has_store
        return TCPStore(self.address, self.port, self.world, is_master, wait_for_workers=False)


def train_distributed(recipe: Recipe, beside: Path, rank: Rank, *, restart: bool = False) -> Path:
    """`loop.train` for a distributed run; called by every process."""
    mesh, store, out = mesh_of(recipe.parallel, rank.world), rank.store(), recipe.folder
    device = device_of(recipe.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank.local)
    team = TrainingGroup(mesh, rank.rank, device, store, timeout_s=recipe.parallel.timeout_s)
    make_trainer = DistributedTrainer if recipe.lora is None else DistributedLora
    lock = locked(out) if team.is_first else nullcontext()
    with _report_failure(store, rank, recipe.parallel.timeout_s), execution_settings(recipe), lock:
        _on_first_rank(team, lambda: _prepare(recipe, beside, out, restart=restart))
        best = Run(recipe, beside, out, partial(make_trainer, team)).run()
        team.wait()
    team.close()
    return best


def _prepare(recipe: Recipe, beside: Path, out: Path, *, restart: bool) -> None:
    """Clear the folder if requested, and create the tokenizer and token files."""
    if restart:
        clear(out, recipe)
    builder = Builder(recipe, beside, out)
    for stage in recipe.stage:
        builder.rows(stage)


def _on_first_rank(team: TrainingGroup, work: Callable[[], None]) -> None:
    """Call `work` on the first rank while the others wait."""
    if team.is_first:
        work()
        team.store.set("prepared", "")
    else:
        team.store.wait(["prepared"], _PREPARE_TIMEOUT)


@contextmanager
def _report_failure(store: Store, rank: Rank, timeout_s: float) -> Iterator[None]:
    """Report an error of this rank in the store. If it was waiting for other ranks, raise TrainingError with these."""
    try:
        yield
    except (GlmError, RuntimeError) as error:
        if not _is_caused_by_peer(error):
            store.set(f"fate/{rank.rank}", str(error).partition("\n")[0])
            raise
        store.set(f"waits/{rank.rank}", "")
        missing: list[str] = []
        for other in range(rank.world):
            try:
                store.wait([f"waits/{other}"], _ASK_TIMEOUT)
            except RuntimeError:
                missing.append(str(other))
        missing_ranks = f"rank {', '.join(missing)}" if missing else "each other"
        raise TrainingError(
            f"rank {rank.rank} waited for {missing_ranks}, which has ended or does not answer (parallel.timeout_s is "
            f"{timeout_s:g}); the state is that of the last checkpoint, and the same command goes on from there"
        ) from error


def _is_caused_by_peer(error: BaseException | None) -> bool:
    """Whether a collective failed because of another rank, in the chain of causes."""
    while error is not None:
        if isinstance(error, DistBackendError) or any(sign in str(error) for sign in _PEER_ERRORS):
            return True
        error = error.__cause__
    return False
