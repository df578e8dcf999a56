"""vLLM's flags of `serve` that have no effect here, each logged at start; and hints for flags of other servers,
mostly SGLang's.

Flags that are also keywords of `LLM` take their reasons from keywords.py.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import field_validator

from glm5.config.command import Also, Command, NoEffect
from glm5.config.keywords import Copies, EngineKeywords, Pipeline


def _as_keyword(name: str) -> NoEffect:
    return next(mark for mark in EngineKeywords.model_fields[name].metadata if isinstance(mark, NoEffect))


_MODEL = "the model is given without a flag, before all others"
_MEMORY = "--gpu-memory-utilization is the share of the GPU's memory that is used in all"
_NONE = "this server has no such choice; leave it out"
_TOKENIZER = "the tokenizer is the checkpoint's"

ELSEWHERE: Mapping[str, str] = {
    "--model": _MODEL,
    "--model-path": _MODEL,
    "--tokenizer": _TOKENIZER,
    "--tokenizer-path": _TOKENIZER,
    "--tokenizer-mode": _TOKENIZER,
    "--revision": "download the checkpoint at that revision, and give its folder",
    "--download-dir": "set HF_HOME, or download the checkpoint and give its folder",
    "--mem-fraction-static": _MEMORY,
    "--context-length": "use --max-model-len",
    "--max-running-requests": "use --max-num-seqs",
    "--max-queued-requests": "use --max-queue",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--max-prefill-tokens": "use --max-num-batched-tokens",
    "--max-total-tokens": "use --num-gpu-blocks-override, in pages of 64 tokens",
    "--page-size": "pages are of 64 tokens; leave it out",
    "--disable-radix-cache": "use --no-enable-prefix-caching",
    "--no-enable-chunked-prefill": "prompts are always computed in parts, of up to --max-num-batched-tokens",
    "--random-seed": "use --seed",
    "--enable-deterministic-inference": "use --deterministic",
    "--enable-hierarchical-cache": "use --kv-offloading-size, in GiB",
    "--hicache-size": "use --kv-offloading-size, in GiB",
    "--hicache-ratio": "use --kv-offloading-size, in GiB",
    "--cpu-offload-gb": "weights stay on the device; for pages, --kv-offloading-size",
    "--enable-metrics": "/metrics is always enabled; leave it out",
    "--enable-request-id-headers": "X-Request-Id is always returned; leave it out",
    "--disable-cuda-graph": "use --enforce-eager",
    "--cuda-graph-max-bs": _NONE,
    "--compilation-config": _NONE,
    "--attention-backend": _NONE,
    "--moe-runner-backend": _NONE,
    "--nsa-prefill-backend": _NONE,
    "--nsa-decode-backend": _NONE,
    "--enable-flashinfer-allreduce-fusion": _NONE,
    "--ssl-keyfile": "put a proxy before the server: docs/operations.md",
    "--ssl-certfile": "put a proxy before the server: docs/operations.md",
    "--root-path": "put a proxy before the server: docs/operations.md",
    "--uvicorn-log-level": "use --log-level",
    "--log-requests": "use --enable-log-requests",
    "--tp-size": "use --tensor-parallel-size",
    "--dp-size": "use --data-parallel-size",
    "--dp": "use --data-parallel-size",
    "--ep-size": "use --enable-expert-parallel",
    "--ep": "use --enable-expert-parallel",
    "--pp-size": "use --pipeline-parallel-size",
}
"""Flags of vLLM and SGLang that do not exist here, with what to use instead."""


class VllmFlags(Command):
    """Flags of deployment guides."""

    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE

    quantization: Annotated[Literal["fp8"] | None, Also("-q")] = None
    """Format of the weights, which is always the checkpoint's: fp8 is refused for a checkpoint without FP8."""
    pipeline_parallel_size: Annotated[Pipeline, Also("-pp")] = 1
    """Pipeline stages of layers on GPUs. Only 1."""
    data_parallel_size: Annotated[Copies, Also("-dp")] = 1
    """Copies of the model. Only 1."""
    enable_expert_parallel: Annotated[bool, _as_keyword("enable_expert_parallel")] = False
    """Expert parallelism over GPUs."""
    distributed_executor_backend: Annotated[
        Literal["mp", "uni"] | None, _as_keyword("distributed_executor_backend")
    ] = None
    """How several GPUs' processes are run."""
    disable_custom_all_reduce: Annotated[bool, _as_keyword("disable_custom_all_reduce")] = False
    """Use NCCL for all-reduce."""
    enforce_eager: Annotated[bool, _as_keyword("enforce_eager")] = False
    """Disable CUDA graphs."""
    enable_sleep_mode: Annotated[bool, _as_keyword("enable_sleep_mode")] = False
    """Let the engine sleep."""
    enable_chunked_prefill: Annotated[bool, _as_keyword("enable_chunked_prefill")] = False
    """Compute prompts in chunks."""
    swap_space: Annotated[float, _as_keyword("swap_space")] = 4.0
    """GiB of host memory for sequences that wait."""
    block_size: Annotated[int, _as_keyword("block_size")] = 64
    """Tokens of a page. Only 64."""
    trust_remote_code: Annotated[bool, _as_keyword("trust_remote_code")] = False
    """Run code of the checkpoint."""
    disable_log_requests: Annotated[bool, NoEffect("prompts are logged only by --enable-log-requests")] = False
    """Write no prompts to the log."""
    disable_log_stats: Annotated[bool, NoEffect("figures are on /metrics, not in the log")] = False
    """Write no statistics to the log."""

    @field_validator("block_size")
    @classmethod
    def _one_size(cls, value: int) -> int:
        if value != 64:
            raise ValueError("64, the one size of pages")
        return value
