"""Times of each op at GLM-5's shapes, compared with the roofline of this GPU.

case       an op at a shape, with its check                machine    measured bandwidth and FLOP/s of this GPU
clock      timing by CUDA graphs over rotating inputs      table      results as text and JSON
tune       the fastest parameters of each kernel on this GPU
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
