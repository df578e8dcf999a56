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
    """Ranks among which whole experts are dealt out; divides data x context and the number of experts."""
    context: Ways = 1
    """Ranks that share the tokens of a pass; each has the latents of all."""
    pipeline: Ways = 1
    """Stages of consecutive layers; the passes of a step (pass_sequences) go through them one behind the other."""
    stages: Ways = 1
    """Of a pipeline, that each of its ranks has: every pipeline-th one. With more of them, ranks wait less, send more;
    passes a step and rank must then be a multiple of pipeline, or fewer than twice as many."""
    schedule: Literal["1f1b", "zero-bubble"] = "1f1b"
    """Of a pipeline. zero-bubble: gradients of weights are computed later, where a stage would wait."""
    dispatch: Literal["all-to-all", "all-gather"] = "all-to-all"
    """How tokens reach their experts. all-gather: all tokens to all, for networks without the other."""
    timeout_s: Annotated[float, Field(gt=0, le=1e6)] = 600.0
    """Seconds after which a rank that the others wait for counts as hung."""
