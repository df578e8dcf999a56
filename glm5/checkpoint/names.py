"""How tensors on disk map to parameters in memory: the one table that load, save and inspect use.

On disk there is one tensor per expert; in memory experts are stacked, gate above up. Every other tensor has the same
name in both places. An FP8 weight and its block scales are a pair on disk (`<name>`, `<name>_scale_inv`) and in memory.
"""

import re
from typing import NamedTuple

from torch import Tensor

SCALE_SUFFIX = "_scale_inv"

# projection on disk -> (stacked parameter, which part of its rows, out of how many parts)
STACKED = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
}
_EXPERT = re.compile(
    r"(?P<experts>.+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight(?P<scale>_scale_inv)?"
)


class Slot(NamedTuple):
    """The place of one tensor from disk: a parameter of the model, or one expert's rows in it."""

    parameter: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1

    @property
    def module(self) -> str:
        """The path of the module that owns the parameter."""
        return self.parameter.rpartition(".")[0]

    def view(self, parameter: Tensor) -> Tensor:
        """The rows of `parameter` that hold this tensor; a view, contiguous if the parameter is.

        Also right for stacked scales: gate and up keep block grids of equal height, one above the other.
        """
        if self.expert is None:
            return parameter
        return parameter[self.expert].chunk(self.num_parts)[self.part]


def slot_of(name: str) -> Slot:
    """Where the tensor called `name` on disk lives in memory. Knows names only, not whether the model has them."""
    found = _EXPERT.fullmatch(name)
    if found is None or found["projection"] not in STACKED:
        return Slot(name)
    parameter, part, num_parts = STACKED[found["projection"]]
    scale = found["scale"] or ""
    return Slot(f"{found['experts']}.{parameter}{scale}", int(found["expert"]), part, num_parts)
