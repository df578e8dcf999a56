"""One rank of the trainer, in a process of its own that `trainer_processes.py` starts."""

from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.broadcaster import OwnChannels
from glm5.checkpoint.handover import Bucket, Channel, Place, stream_of
from glm5.checkpoint.versions import WeightFiles
from glm5.checkpoint.writer import TensorLayout
from glm5.config.parallel import ParallelConfig
from glm5.config.rl import RLRecipe
from glm5.kernels.current_device import current
from glm5.parallel.rendezvous import Rendezvous, store_at
from glm5.rl.build import PolicyBuilder
from glm5.rl.records.digest import digests
from glm5.rl.sharded_trainer import ShardedTrainer
from glm5.rl.state import RunState
from glm5.rl.trainer import PolicyTrainer, arithmetic
from glm5.train.parallel.mesh import mesh_of
from glm5.train.parallel.training_group import TrainingGroup
from glm5.train.stage_trainer import device_of


class TrainerRank:
    """Rank `rank` of `num_ranks`. All ranks are called alike; methods in `concurrent` only the first one."""

    concurrent = frozenset({"fill", "send", "drop", "publish", "whole"})

    def __init__(self, recipe: RLRecipe, out: str, device: str, rank: int, num_ranks: int) -> None:
        self.recipe, self.rank, self.num_ranks, self.beyond = recipe, rank, num_ranks, recipe.ray is not None
        device_of(device)  # raises where there is none
        index = 0 if device == "cuda" else None
        self.device = torch.device(device, index) if index is not None else torch.device(device)
        self._settings = ExitStack()
        self._settings.enter_context(current(self.device))
        self._settings.enter_context(arithmetic(recipe, self.device))
        self.builder, self.state = PolicyBuilder(recipe, Path(out)), RunState(Path(out), recipe)
        self._tensors: dict[str, Tensor] = {}
        self._channels, self._keys = dict[int, Channel](), count()

    def open(self) -> tuple[str, int]:
        """Host and port where the ranks meet, on the first of them."""
        rendezvous = Rendezvous(beyond=self.beyond)
        self._store = rendezvous.open(self.num_ranks)
        return rendezvous.host, rendezvous.port

    def join(self, address: tuple[str, int]) -> None:
        """Form a group with the others, and build the model."""
        if self.num_ranks == 1:
            self.trainer = PolicyTrainer(self.recipe, self.builder, self.device)
            return
        host, port = address
        store = store_at(port, self.num_ranks, host) if self.rank else self._store
        mesh, given = mesh_of(ParallelConfig(), self.num_ranks), {"timeout_s": self.recipe.trainer.timeout_s}
        team = TrainingGroup(mesh, self.rank, self.device, store, beyond=self.beyond, **given)
        self.trainer = ShardedTrainer(self.recipe, self.builder, team)

    def warm_up(self) -> None:
        self.trainer.warm_up()

    def begin(self) -> None:
        self.trainer.begin()

    def load_state(self) -> None:
        """That of the run's folder."""
        saved = self.state.read()
        assert saved is not None, "the run has a state"
        self.trainer.load_state(saved["trainer"])

    def check(self, arithmetic: str | None) -> None:
        self.trainer.check(arithmetic)

    def learn(self, *args: Any) -> Any:
        return self.trainer.learn(*args)

    def save(self, *args: Any) -> None:
        self.trainer.save(self.state, *args)

    def digests(self) -> dict[str, str]:
        return digests(self.trainer.learnt())

    def offer(self) -> tuple[list[TensorLayout], torch.device] | None:
        """On the first rank, the layout of the weights as an engine gets them: channels are filled from them."""
        weights = self.trainer.weights()
        if self.rank:
            return None
        stream = stream_of(weights)
        self._tensors = dict(zip([one.name for one in stream.layout], stream.tensors, strict=True))
        return list(stream.layout), self.device

    def publish(self, version: int) -> tuple[Path, int]:
        """Write the weights as a version of the shared folder: the path of its marker, and its bytes."""
        with current(self.device):
            path = self._files.publish(self._tensors, version)
        return path, self._files.num_bytes

    def whole(self) -> tuple[Path, int]:
        """The last version as a whole."""
        return self._files.whole(), self._files.num_bytes

    @property
    def _files(self) -> WeightFiles:
        assert self.trainer.files is not None, "the recipe's channel is files"
        return self.trainer.files

    def buffers(self, num_bytes: int) -> tuple[int, Place]:
        """A channel through host memory: its number, and where it is."""
        return self._opened(OwnChannels().buffers(num_bytes))

    def broadcaster(self, num_ranks: int, beyond: bool) -> tuple[int, Place]:
        """A channel by a collective to an engine of so many ranks."""
        return self._opened(OwnChannels().broadcaster(num_ranks, self.device, beyond=beyond))

    def _opened(self, channel: Channel) -> tuple[int, Place]:
        key = next(self._keys)
        self._channels[key] = channel
        return key, channel.place

    def fill(self, key: int, which: int, bucket: Bucket) -> int:
        """See `handover.Channel`, as for the following."""
        with current(self.device):
            return self._channels[key].fill(which, bucket, iter([self._tensors[layout.name] for layout, _ in bucket]))

    def send(self, key: int) -> None:
        with current(self.device):
            self._channels[key].send(lambda: key in self._channels)

    def drop(self, key: int) -> None:
        if (channel := self._channels.pop(key, None)) is not None:
            channel.close()
