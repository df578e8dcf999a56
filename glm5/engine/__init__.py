"""Requests to tokens. Begin with `llm.py`, or `async_engine.py` for asyncio: what programs call.

frontend      text to token ids, checked requests, streamed answers; no tensors
transport     typed messages between the caller's process and the engine's, heartbeats
core          the engine's loop: messages in, a step planned and launched, its tokens out
scheduler     which rows the next step computes, and with which pages; plain Python
runner        a plan computed on the device       sampling   logits to tokens
cache, tiers  KV-cache pages on the device        distributed   the ranks of tensor parallelism
`joined.py` lets further processes use one engine. `build.py` turns settings into a core, `process.py` and `rank.py` are
the programs of engine and rank processes.
"""

from typing import TYPE_CHECKING

from glm5.common.lazy import exports

if TYPE_CHECKING:
    from glm5.engine.async_engine import AsyncEngine
    from glm5.engine.frontend.outputs import CompletionOutput, Delta, RequestOutput
    from glm5.engine.llm import LLM
    from glm5.engine.sampling.params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "Delta",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
# The engine process imports torch; a program that only sends it requests does not.
_MODULES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "CompletionOutput": "frontend.outputs",
    "Delta": "frontend.outputs",
    "RequestOutput": "frontend.outputs",
    "SamplingParams": "sampling.params",
    "StructuredOutputsParams": "sampling.params",
}
__getattr__ = exports(__name__, {name: f"{__name__}.{home}" for name, home in _MODULES.items()})
