"""vLLM's flags of `serve` that ask for what is done anyway, or for nothing that is here; each says so at start.

Why is written once: flags that are keywords of `LLM` too have the reasons of keywords.py.
"""

from typing import Annotated, Literal

from pydantic import field_validator

from glm5.config.command import Also, Command, NoEffect
from glm5.config.keywords import EngineKeywords


def _as_keyword(name: str) -> NoEffect:
    return next(mark for mark in EngineKeywords.model_fields[name].metadata if isinstance(mark, NoEffect))


class VllmFlags(Command):
    """Flags of deployment guides."""

    tensor_parallel_size: Annotated[int, Also("--tp")] = 1
    """GPUs that share the model. Only 1 in this version."""
    pipeline_parallel_size: Annotated[int, _as_keyword("pipeline_parallel_size")] = 1
    """GPUs that have layers each. Only 1."""
    data_parallel_size: Annotated[int, _as_keyword("data_parallel_size")] = 1
    """Copies of the model. Only 1."""
    enable_expert_parallel: Annotated[bool, NoEffect("all experts are on one device")] = False
    """Spread experts over GPUs."""
    distributed_executor_backend: Annotated[
        Literal["mp", "uni"] | None, _as_keyword("distributed_executor_backend")
    ] = None
    """How several GPUs' processes are run."""
    disable_custom_all_reduce: Annotated[bool, _as_keyword("disable_custom_all_reduce")] = False
    """Let NCCL add what several GPUs computed."""
    enforce_eager: Annotated[bool, _as_keyword("enforce_eager")] = False
    """Capture nothing as a graph."""
    enable_sleep_mode: Annotated[bool, _as_keyword("enable_sleep_mode")] = False
    """Let the engine sleep."""
    enable_chunked_prefill: Annotated[bool, _as_keyword("enable_chunked_prefill")] = False
    """Compute prompts in parts."""
    swap_space: Annotated[float, _as_keyword("swap_space")] = 4.0
    """GiB of host memory for sequences that wait."""
    block_size: Annotated[int, _as_keyword("block_size")] = 64
    """Tokens of a page. Only 64."""
    load_format: Annotated[Literal["auto", "safetensors"], _as_keyword("load_format")] = "auto"
    """Format of the weights."""
    trust_remote_code: Annotated[bool, _as_keyword("trust_remote_code")] = False
    """Allow a checkpoint's own code."""
    disable_log_requests: Annotated[bool, NoEffect("prompts are logged only by --enable-log-requests")] = False
    """Write no prompts to the log."""
    disable_log_stats: Annotated[bool, NoEffect("figures are on /metrics, not in the log")] = False
    """Write no figures to the log."""

    @field_validator("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    @classmethod
    def _one_device(cls, value: int) -> int:
        if value != 1:
            raise ValueError("1 (this version runs a model on one device)")
        return value

    @field_validator("block_size")
    @classmethod
    def _one_size(cls, value: int) -> int:
        if value != 64:
            raise ValueError("64, the one size of pages")
        return value
