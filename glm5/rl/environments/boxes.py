"""What environments need of a sandbox: boxes to run programs in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from glm5.rl.environments.protocol import EpisodeFailed
from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.sandbox import Limits, Sandbox


@dataclass(frozen=True)
class Boxes:
    """`python`: the interpreter in the boxes that `open` makes. `open` takes limits by name, as `Limits` has them."""

    open: Callable[..., Sandbox]
    python: str

    @classmethod
    def of(cls, backend: Backend) -> Self:
        return cls(lambda **limits: Sandbox(backend, Limits(**limits)), backend.python)


def _no_box(**_: int) -> Sandbox:
    raise EpisodeFailed("sandbox", "this task runs what the policy writes, and there is no sandbox")


NO_BOXES = Boxes(_no_box, "")
