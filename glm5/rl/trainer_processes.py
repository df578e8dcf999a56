"""The trainer in processes of its own, one for each of its devices.

Sequences of a step go to all of them, columns of scores come back. Weights go from the first one to the engines, and
not through this process. One that ends, or is silent for too long, ends them all, with an error that says which.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.checkpoint.handover import Bucket, Place, TensorStream
from glm5.checkpoint.versions import clear
from glm5.common.errors import ConfigError, ProcessEnded, TrainingError
from glm5.common.remote import CLOSED, Remote
from glm5.config.rl import RLRecipe
from glm5.rl.build import Launcher, here, weight_folder
from glm5.rl.rewards.anchors import Anchors
from glm5.rl.rollout import Rollout
from glm5.rl.segments import SegmentTree
from glm5.rl.state import RunState
from glm5.rl.trainer import GroupTrainer, Learnt, Sequences
from glm5.rl.training.sequences import TrainingSequence

_GRACE_SECONDS = 2.0  # after a rank's error, for the end of the one that caused it to be noticed
_LOOKS_SECONDS = 0.05


class TrainerProcesses(GroupTrainer):
    """Has the methods of `PolicyTrainer` that a run calls, except that the state is read and written there."""

    def __init__(
        self,
        recipe: RLRecipe,
        out: Path,
        devices: Sequence[str],
        launcher: Launcher = here,
        anchors: Anchors | None = None,
    ) -> None:
        super().__init__(recipe, anchors)
        num, timeout_s = len(devices), recipe.trainer.timeout_s
        self._ranks, self._out = list[Remote](), out
        try:
            for rank, device in enumerate(devices):
                name = "the trainer" if num == 1 else f"rank {rank} of the trainer's {num}"
                args = recipe, str(out), device, rank, num
                given = {"name": name, "watchdog_timeout": timeout_s, "launch": launcher(device)}
                self._ranks.append(Remote("glm5.rl.trainer_rank:TrainerRank", *args, **given))
            self._together([one.ready for one in self._ranks])
            self._all("join", self._ranks[0].call("open").result())
        except BaseException:
            self.close()
            raise

    def warm_up(self) -> None:
        self._all("warm_up")

    def begin(self) -> None:
        self._all("begin")

    def load_state(self, _state: Mapping[str, Any]) -> None:
        self._all("load_state")

    def check(self, arithmetic: str | None) -> None:
        self._all("check", arithmetic)

    def learn(self, sequences: Sequences, parts: Sequence[Sequences], step: int) -> Learnt:
        light = dict(zip(map(id, sequences), _light(sequences), strict=True))
        given = [light[id(one)] for one in sequences], [[light[id(one)] for one in part] for part in parts]
        (metrics, columns), *others = self._all("learn", *given, step)
        for _, more in others:
            for name, column in more.items():
                mine = columns.setdefault(name, column)
                columns[name] = np.where(np.isnan(mine), column, mine)
        return metrics, columns

    def save(self, _state: RunState, *args: Any) -> None:
        self._all("save", *args)

    def digests(self) -> dict[str, str]:
        return self._all("digests")[0]

    def weights(self) -> TensorStream:
        """As an engine gets them; the first rank sends them."""
        layout, device = self._all("offer")[0]
        return TensorStream(layout, (), device, _Channels(self._ranks[0]))

    @cached_property
    def files(self) -> "_Files | None":
        """By which weights go to the engines, if by files: the first rank writes them."""
        folder = weight_folder(self.recipe, self._out)
        return None if folder is None else _Files(self._ranks[0], folder)

    @property
    def has_ended(self) -> bool:
        """Whether a process ended by itself, or was killed because it was silent."""
        return any(one.ended not in ("", CLOSED) for one in self._ranks)

    def close(self) -> None:
        """End all processes. Closing again does nothing."""
        for one in self._ranks:
            one.kill()

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._together([one.call(method, *args) for one in self._ranks])

    def _together(self, futures: "Sequence[Future[Any]]") -> list[Any]:
        """Their results. Where one fails, all processes end; the error is that of the one that ended, if one did."""
        done = wait(futures, return_when=FIRST_EXCEPTION).done
        if any(one.exception() is not None for one in done):
            wait(futures, _GRACE_SECONDS)
            errors = [error for one in futures if one.done() and (error := one.exception()) is not None]
            self.close()
            error = next((one for one in errors if isinstance(one, ProcessEnded)), errors[0])
            if isinstance(error, (TrainingError, ConfigError)):
                raise error
            raise TrainingError(str(error)) from error
        return [one.result() for one in futures]


class _Files:
    """See `WeightFiles`: those of the trainer's first process, with the weights that it has offered."""

    def __init__(self, remote: Remote, folder: Path) -> None:
        self._remote, self._folder, self.num_bytes = remote, folder, 0

    def publish(self, tensors: TensorStream, version: int) -> Path:
        path, self.num_bytes = self._remote.call("publish", version).result()
        return path

    def whole(self) -> Path:
        path, self.num_bytes = self._remote.call("whole").result()
        return path

    def clear(self) -> None:
        clear(self._folder)


class _Channels:
    """See `handover.Channels`: those of the trainer's first process."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def buffers(self, num_bytes: int) -> "_Channel":
        return _Channel(self._remote, *self._remote.call("buffers", num_bytes).result())

    def broadcaster(self, num_ranks: int, device: torch.device, *, beyond: bool) -> "_Channel":
        return _Channel(self._remote, *self._remote.call("broadcaster", num_ranks, beyond).result())


class _Channel:
    def __init__(self, remote: Remote, key: int, place: Place) -> None:
        self._remote, self._key, self.place = remote, key, place

    def fill(self, which: int, bucket: Bucket, tensors: Iterator[Tensor]) -> int:
        return self._remote.call("fill", self._key, which, bucket).result()

    def send(self, is_wanted: Callable[[], bool]) -> None:
        sent = self._remote.call("send", self._key)
        while not wait([sent], _LOOKS_SECONDS).done:
            if not is_wanted():
                self.close()
        sent.result()

    def close(self) -> None:
        self._remote.call("drop", self._key)


def _light(sequences: Sequences) -> list[TrainingSequence]:
    """The same, with only that of their rollouts which a critic reads."""
    light: dict[int, Rollout] = {}
    for one in sequences:
        if one.rollout is not None and id(one.rollout) not in light:
            light[id(one.rollout)] = replace(one.rollout, tree=SegmentTree(), messages=[])
    return [one if one.rollout is None else replace(one, rollout=light[id(one.rollout)]) for one in sequences]
