"""The interfaces of the core's parts: the runner, the weights, the cache's memory, the other ranks."""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from glm5.engine.runner.result import StepResult
from glm5.engine.runner.runner import SeqSpec
from glm5.engine.scheduler.messages import Message
from glm5.engine.scheduler.plan import StepPlan
from glm5.engine.transport.wire import PushCall


class Launched(Protocol):
    def read(self) -> StepResult: ...


class StepRunner(Protocol):
    """What the core needs of a runner (`glm5.engine.runner.runner.Runner`)."""

    def set_bitmasks(self, slots: list[int], bitmasks: Tensor) -> None: ...

    def launch(self, plan: StepPlan, specs: Mapping[int, SeqSpec]) -> Launched: ...

    def weights_changed(self) -> None: ...


class Followers(Protocol):
    """The other ranks of an engine over several (`glm5.engine.distributed.ranks`)."""

    def broadcast(self, step: int, messages: list[Message], specs: Mapping[int, SeqSpec], *, is_masked: bool) -> None:
        """Send the scheduler messages delivered before `step`, which is planned next. `specs` contains their new
        sequences. `is_masked`: the step may need grammar bitmasks (`StepRunner.set_bitmasks`)."""
        ...

    def close(self) -> None: ...


class WeightSource(Protocol):
    """What the engine core needs of the weights' owner."""

    @property
    def version(self) -> int: ...

    @property
    def identity(self) -> bytes: ...

    def stage(self, folder: Path) -> "Future[Any]":
        """Start to read and check weights; nothing is replaced yet. The result has `is_complete`: whether it has all
        tensors of the model, and `num_bytes`. `folder`: of a checkpoint, or the marker of a version (versions.py). The
        future may raise anything."""
        ...

    def swap(self, staged: Any, version: int) -> None:
        """Replace the weights by staged ones. No step may be launched during the call."""
        ...

    def prepare(self, push: PushCall) -> "Future[bool]":
        """Check what a push announces. Whether it has all tensors of the model."""
        ...

    def check_sum(self, number: int, checksum: int) -> "Future[None]":
        """Check the bytes of a bucket of the prepared push."""
        ...

    def write(self, number: int) -> "Future[None]":
        """Write a bucket of the prepared push. No step may run before a push of all tensors, or `swap`, is finished."""
        ...

    def end_push(self, version: int | None) -> None:
        """All buckets are written, or the push has failed (None)."""
        ...

    def check_source(self) -> None:
        """RequestError if released weights could not be read again."""
        ...

    def release(self, level: int) -> int:
        """Release memory for this level of sleep; the freed bytes."""
        ...

    def take_changes(self, version: int, *, closely: bool) -> bool:
        """Whether the owner of a shared model has changed its weights; they then get the number `version`.
        `closely`: see `SharedModel.has_changed`. ConfigError if the model now has other tensors."""
        ...

    def restore(self) -> bool:
        """Restore the weights. Returns whether they differ from those before (see `version` and `identity`). After a
        GlmError they stay released."""
        ...


class Memory(Protocol):
    """A cache whose memory can be released and restored."""

    def release_memory(self) -> int: ...

    def restore_memory(self) -> None: ...
