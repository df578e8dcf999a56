"""What environments need of a sandbox: a box to run a program in, as `glm5/rl/sandbox` makes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from glm5.rl.environments.protocol import EpisodeFailed


class Completed(Protocol):
    """How a program ended. `ended_by`: "exit", or the limit that it exceeded."""

    @property
    def exit_code(self) -> int: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...
    @property
    def ended_by(self) -> str: ...


class Box(Protocol):
    """One box. OSError is what a program in it may have caused, SandboxFailed a fault of the box."""

    def run(self, command: str | Sequence[str], timeout: float = ..., stdin: bytes = ...) -> Completed: ...
    def read(self, path: str) -> bytes: ...
    def write(self, path: str, data: bytes) -> None: ...
    def fresh_copy(self) -> "Box": ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Boxes:
    """`python`: the interpreter in the boxes that `open` makes. `open` takes limits by name, as `Limits` has them."""

    open: Callable[..., Box]
    python: str


def _no_box(**_: int) -> Box:
    raise EpisodeFailed("sandbox", "this task runs what the policy writes, and there is no sandbox")


NO_BOXES = Boxes(_no_box, "")
