"""One rank's way through a run, and whose fault it was if it ends badly."""

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
from glm5.train.loop import Run, ordered
from glm5.train.parallel.lora import SharedLora
from glm5.train.parallel.mesh import mesh_of
from glm5.train.parallel.trainer import SharedTrainer
from glm5.train.parallel.training_group import TrainingGroup
from glm5.train.stage_trainer import device_of
from glm5.train.state import clear, locked

_PREPARING = timedelta(days=1)  # the first rank may tokenize for long
_ASKING = timedelta(seconds=5)  # until all who wait for somebody have said so
_SIGNS = ("closed by peer", "Timed out", "timed out", "Connection reset", "remote worker")


@dataclass(frozen=True)
class Rank:
    """What a launcher says to a process: torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    `has_store`: the launcher keeps the store where ranks meet; else the first rank does.
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


def train_shared(recipe: Recipe, beside: Path, rank: Rank, *, restart: bool = False) -> Path:
    """`loop.train` by one of several processes, all of which call this."""
    mesh, store, out = mesh_of(recipe.parallel, rank.world), rank.store(), recipe.folder
    device = device_of(recipe.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank.local)
    team = TrainingGroup(mesh, rank.rank, device, store, timeout_s=recipe.parallel.timeout_s)
    makes = SharedTrainer if recipe.lora is None else SharedLora
    lock = locked(out) if team.is_first else nullcontext()
    with _blaming(store, rank, recipe.parallel.timeout_s), ordered(recipe), lock:
        _first(team, lambda: _prepare(recipe, beside, out, restart=restart))
        best = Run(recipe, beside, out, partial(makes, team)).to_the_end()
        team.wait()
    team.close()
    return best


def _prepare(recipe: Recipe, beside: Path, out: Path, *, restart: bool) -> None:
    """What all will find: nothing of an earlier run where it is thrown away, tokenizer and token files."""
    if restart:
        clear(out, recipe)
    builder = Builder(recipe, beside, out)
    for stage in recipe.stage:
        builder.rows(stage)


def _first(team: TrainingGroup, work: Callable[[], None]) -> None:
    """Work that the first rank does while the others wait."""
    if team.is_first:
        work()
        team.store.set("prepared", "")
    else:
        team.store.wait(["prepared"], _PREPARING)


@contextmanager
def _blaming(store: Store, rank: Rank, timeout_s: float) -> Iterator[None]:
    """Say of a rank what ended it. Where it waited for another one in vain: for which."""
    try:
        yield
    except (GlmError, RuntimeError) as error:
        if not _is_of_others(error):
            store.set(f"fate/{rank.rank}", str(error).partition("\n")[0])
            raise
        store.set(f"waits/{rank.rank}", "")
        missing: list[str] = []
        for other in range(rank.world):
            try:
                store.wait([f"waits/{other}"], _ASKING)
            except RuntimeError:
                missing.append(str(other))
        whom = f"rank {', '.join(missing)}" if missing else "each other"
        raise TrainingError(
            f"rank {rank.rank} waited for {whom}, which has ended or does not answer (parallel.timeout_s is "
            f"{timeout_s:g}); the state is that of the last checkpoint, and the same command goes on from there"
        ) from error


def _is_of_others(error: BaseException | None) -> bool:
    """Whether a collective failed because of another rank, at whatever place."""
    while error is not None:
        if isinstance(error, DistBackendError) or any(sign in str(error) for sign in _SIGNS):
            return True
        error = error.__cause__
    return False
