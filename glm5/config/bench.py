"""`glm5 bench throughput` and `glm5 bench latency`: a fixed workload, ours beside a peer."""

from typing import Annotated, Literal

from pydantic import Field

from glm5.config.command import Also
from glm5.config.speculative import EngineFlags


class BenchConfig(EngineFlags):
    """What both commands are told beside the engine's settings."""

    model: str
    """Checkpoint folder, or a Hugging Face id such as zai-org/GLM-5-FP8."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Element type of the weights. auto keeps what the checkpoint holds, FP8 included; a name dequantizes."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """auto (the GPU if there is one), cpu, cuda or cuda:N."""
    against: Literal["transformers"] | None = None
    """Run the same prompts through another implementation, too. Needs the extra bench."""
    num_prompts: Annotated[int, Field(ge=1, le=10**6), Also("--requests")] = 32
    """Requests."""
    num_iters: Annotated[int, Field(ge=1)] = 3
    """How often each side runs the workload; the fastest run of each counts."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of prompts and lengths."""
    json_: Annotated[str | None, Field(alias="json")] = None
    """File for the results."""


class ThroughputConfig(BenchConfig):
    """Requests of mixed length, all at once: prompts of 16 to 256 tokens, answers of 16 to 128, greedy."""


class LatencyConfig(BenchConfig):
    """Requests of mixed length, one after the other: prompts of 16 to 256 tokens, answers of 16 to 128, greedy."""

    num_prompts: Annotated[int, Field(ge=1, le=10**6), Also("--requests")] = 8
    """Requests."""
