"""`glm5 bench kernels`: which kernels are measured, and what becomes of the figures."""

from typing import Annotated

from pydantic import Field

from glm5.config.command import Command


class BenchKernelsConfig(Command):
    """Check each kernel against float64 at GLM-5's shapes, time it, and compare it with what this GPU can do."""

    only: str = ""
    """Those whose line contains this, such as sparse_mla or M=8."""
    json_: Annotated[str | None, Field(alias="json")] = None
    """File for the results."""
    tune: bool = False
    """In place of the table: find the fastest parameters for this GPU, and write them to glm5/kernels/tuned."""
    tuned: str | None = None
    """Another file for what --tune finds."""
