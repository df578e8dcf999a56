"""What the core asks of its parts: a runner, the weights, the cache's memory, other ranks."""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from glm5.engine.runner.result import StepResult
from glm5.engine.runner.runner import SeqSpec
from glm5.engine.scheduler.messages import Message
from glm5.engine.scheduler.plan import StepPlan


class Launched(Protocol):
    def read(self) -> StepResult: ...


class StepRunner(Protocol):
    """What the core asks of a runner (`glm5.engine.runner.runner.Runner`)."""

    def permit(self, slots: list[int], masks_BJM: Tensor) -> None: ...

    def launch(self, plan: StepPlan, specs: Mapping[int, SeqSpec]) -> Launched: ...

    def weights_changed(self) -> None: ...


class Followers(Protocol):
    """The other ranks of an engine over several (`glm5.engine.distributed.ranks`)."""

    def broadcast(self, step: int, messages: list[Message], specs: Mapping[int, SeqSpec], *, is_masked: bool) -> None:
        """What the scheduler is told before `step`, the plan that is launched next. `specs` has the sequences that it
        hears of; `is_masked`: grammars may bar tokens (`StepRunner.permit`)."""
        ...

    def close(self) -> None: ...


class WeightSource(Protocol):
    """What the engine core asks of the owner of the weights."""

    @property
    def version(self) -> int: ...

    @property
    def identity(self) -> bytes: ...

    def stage(self, folder: Path) -> "Future[Any]":
        """Weights read and checked, on their way. The future may raise anything; nothing is replaced yet."""
        ...

    def swap(self, staged: Any, version: int) -> None:
        """Replace the weights by staged ones. No step may run that was not launched before."""
        ...

    def check_source(self) -> None:
        """RequestError where weights that were dropped could not be read again."""
        ...

    def release(self, level: int) -> int:
        """Give memory back, as far as the level of sleep says; bytes."""
        ...

    def take_changes(self, version: int, *, closely: bool) -> bool:
        """Whether the owner of a shared model has put other weights into it: they are those of `version` then.
        `closely`: as `SharedModel.has_changed`. Raises ConfigError where they became another model's."""
        ...

    def restore(self) -> bool:
        """Bring them back. Whether they are other weights than before (`version` and `identity` say which). A GlmError
        leaves them given back."""
        ...


class Memory(Protocol):
    """A cache whose memory can be given back."""

    def release_memory(self) -> int: ...

    def restore_memory(self) -> None: ...
