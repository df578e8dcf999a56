"""How a training run is distributed over processes: the `[parallel]` table of a recipe. It has no effect with one
process. `glm5 train --nproc` or torchrun sets the number of processes."""

from typing import Annotated, Literal

from pydantic import Field

from glm5.config.step import Section

Ways = Annotated[int, Field(ge=1)]


class ParallelConfig(Section):
    """processes = pipeline x context x data; what is left over after pipeline and context is data. Parameters,
    gradients and optimizer state are sharded over data and context (FSDP2), experts first over `expert`."""

    expert: Ways = 1
    """Ranks of expert parallelism; divides data x context and the number of experts."""
    context: Ways = 1
    """Ranks of context parallelism: they share the tokens of a pass, and each has the latents of all."""
    pipeline: Ways = 1
    """Pipeline stages of consecutive layers; the passes of a step (pass_sequences) are its micro-batches."""
    stages: Ways = 1
    """Of a pipeline, that each of its ranks has: every pipeline-th one. With more of them, ranks wait less, send more;
    passes a step and rank must then be a multiple of pipeline, or fewer than twice as many."""
    schedule: Literal["1f1b", "zero-bubble"] = "1f1b"
    """Of a pipeline. zero-bubble: gradients of weights are computed later, where a stage would wait."""
    dispatch: Literal["all-to-all", "all-gather"] = "all-to-all"
    """How tokens are sent to their experts. all-gather: all tokens to all ranks, for networks without all-to-all."""
    timeout_s: Annotated[float, Field(gt=0, le=1e6)] = 600.0
    """Timeout in seconds of a rank that others wait for."""
