"""How long each op takes at GLM-5's shapes, against what its bytes and operations must take on this card.

case       what is measured: an op at a shape, with its check     machine    what this card can do, measured
clock      how it is measured: CUDA graphs over rotating inputs   table      for people and, as JSON, for programs
tune       the fastest parameters of each kernel on this card
The other files are cases, each runnable: `python -m glm5.bench.kernels.experts --help`; `glm5 bench kernels` runs all.
"""

from collections.abc import Iterator
from importlib import import_module

from glm5.bench.kernels.case import Case

PARTS = ("linear", "experts", "quantized", "elementwise", "preparation", "attention")


def every_case() -> Iterator[Case]:
    """The cases of all files."""
    for module in [import_module(f"glm5.bench.kernels.{part}") for part in PARTS]:
        yield from module.cases()
