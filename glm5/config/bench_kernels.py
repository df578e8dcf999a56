"""Settings of `glm5 bench kernels`."""

from typing import Annotated

from pydantic import Field

from glm5.config.command import Command


class BenchKernelsConfig(Command):
    """Check each kernel against float64 at GLM-5's shapes, time it, and compare it with the roofline of this GPU."""

    only: str = ""
    """Only kernels whose line contains this, such as sparse_mla or M=8."""
    json_: Annotated[str | None, Field(alias="json")] = None
    """File for the results."""
    tune: bool = False
    """In place of the table: find the fastest parameters for this GPU, and write them to glm5/kernels/tuned."""
    tuned: str | None = None
    """File for the parameters found by --tune. Default: the one in glm5/kernels/tuned."""
