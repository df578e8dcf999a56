"""Writes the state of a distributed run asynchronously; every rank writes its own part.

    each rank   writes its rows to state-RUN-NUMBER-RANK.pt, in a thread, from copies on the host
    first rank  when all parts exist, writes state.pt, which names them, and deletes older parts

So state.pt is replaced atomically and names complete files. A state is written only after the previous one.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.common.atomic import atomic_write
from glm5.common.errors import TrainingError
from glm5.train.optim.build import Optimizers
from glm5.train.parallel.build import ModelShard
from glm5.train.state import Position, Store, writing_to

_LOOKS_EVERY_S = 0.01


class StateWriter:
    """The writer of rank `rank` of `size`. `run`: a unique name of the run, the same on all ranks."""

    def __init__(self, rank: int, size: int, run: str, *, timeout_s: float) -> None:
        self.rank, self.size, self.run, self.timeout_s = rank, size, run, timeout_s
        self._number = 0
        self._pool = ThreadPoolExecutor(1, "state")
        self._writing: Future[None] | None = None

    def write(self, store: Store, position: Position, part: ModelShard, optimizers: Optimizers) -> None:
        """Begin to write. Raises TrainingError where the previous state could not be written."""
        self.finish()
        self._number += 1
        names = [f"state-{self.run}-{self._number}-{rank}of{self.size}.pt" for rank in range(self.size)]
        content, position = content_of(part, self.rank, optimizers), deepcopy(position)
        self._writing = self._pool.submit(self._write, store, position, names, content, self._number)

    def finish(self) -> None:
        """Wait for the pending write. Raises TrainingError where it failed."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, store: Store, position: Position, names: list[str], content: dict[str, Any], number: int) -> None:
        file = store.out / names[self.rank]
        with writing_to(file), atomic_write(file, "wb") as handle:
            torch.save(content, handle)
        if self.rank == 0:
            self._await([store.out / name for name in names])
            store.write(position, {}, {}, parts=names)
            for old in store.out.glob("state-*.pt"):  # except those of the next state by faster ranks
                run, theirs = old.name.split("-")[1:3]
                if run != self.run or int(theirs) < number:
                    old.unlink(missing_ok=True)

    def _await(self, files: list[Path]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while missing := [file.name for file in files if not file.exists()]:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"the state was not written: {missing[0]} is missing after {self.timeout_s:.0f} s; what was there "
                    "before is unchanged"
                )
            time.sleep(_LOOKS_EVERY_S)


def content_of(part: ModelShard, rank: int, optimizers: Optimizers) -> dict[str, Any]:
    """This rank's part in the format of `train/sharded_state.py`, copied to the host so that training can continue."""
    named = {name: weight for name, weight in part.local.items() if weight.requires_grad or not part.has_base}
    return {
        "spans": {name: part.layout.spans(name, rank) for name in named},
        "shapes": {name: part.layout.shapes[name] for name in named},
        "weights": {name: _copied(weight) for name, weight in named.items()},
        "optimizer": {
            name: {key: _copied(one) for key, one in state.items()} for name, state in optimizers.state_dict().items()
        },
        "buffers": {} if part.has_base else {name: _copied(one) for name, one in part.buffers.items()},
    }


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
