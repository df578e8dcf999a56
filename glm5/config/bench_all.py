"""Settings of `glm5 bench all`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from glm5.config.command import Also, Command

Count = Annotated[int, Field(ge=1)]
# Defaults for the small presets, which fit into the shortest context of a preset, 1024.
_SMALL = {
    "max_concurrency": (1, 8),
    "input_len": 128,
    "output_len": 32,
    "requests": 4,
    "context": (256, 512),
    "batch": (1, 8),
}


class BenchAllConfig(Command):
    """Measure the model of this machine's size on all of its GPUs, part by part: steps, prompts and start; a server
    under load; steps with shared indices; kernels. The same command skips finished parts and continues with the
    others."""

    json_: Annotated[str, Field(alias="json")] = "docs/performance/h200.json"
    """File for the results; other entries in it stay."""
    work: str = "runs/bench"
    """Folder for the results of each part."""
    time_limit: Annotated[float, Field(gt=0)] = 600.0
    """Seconds. Only parts that are expected to end in time are started."""
    tensor_parallel_size: Annotated[Count | None, Also("--tp"), Also("-tp")] = None
    """GPUs. Default: all of this machine. 8 have the full model, fewer a proportional number of layers."""
    preset: Literal["glm-5", "nano", "tiny"] = "glm-5"
    """The architecture. glm-5 needs GPUs; the others are for trying this command, with smaller defaults."""
    num_hidden_layers: Count | None = None
    """Number of layers. Default: the share of all layers for the number of GPUs."""
    max_concurrency: tuple[Count, ...] = (1, 8, 16, 32, 64, 128)
    """Clients of the server, one part each."""
    input_len: Count = 2048
    """Tokens of a prompt."""
    output_len: Count = 512
    """Tokens of an answer of the server. Steps are timed over half as many."""
    requests: Count = 8
    """Requests of each client, one after the other."""
    context: tuple[Count, ...] = (32768, 131072)
    """Contexts at which one sequence decodes."""
    batch: tuple[Count, ...] = (1, 8, 32, 64, 128)
    """Sequences that decode together."""
    engine: tuple[str, ...] = ("kv-cache-dtype=fp8", "max-num-batched-tokens=4096")
    """Flags of every engine, without leading dashes."""
    commit: str | None = None
    """Commit to record in the results, if there is no git repository."""

    @model_validator(mode="before")
    @classmethod
    def _small_numbers(cls, given: Any) -> Any:
        return _SMALL | given if given.get("preset") in ("nano", "tiny") else given
