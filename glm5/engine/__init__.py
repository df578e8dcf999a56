"""Requests to tokens.

llm, async_engine    what programs call: `LLM`, and `AsyncEngine` under asyncio
client               requests out, updates in: what both share       link       to the process, or to a core in this one
request_builder      a request checked and written            output_stream an answer's text as it grows
text, stop           detokenizer and stop strings
process              the child: `python -m glm5.engine.process`      core       its turns: messages, schedule, steps
scheduler            which rows the next step computes               runner     a plan computed: tokens
kv, pages, prefix    the cache, its pages, who shares them           tiers      pages in host memory and on disk
sampling             logits to tokens                                wire       what client and process say

`outputs` and `sampling.params` are what callers write and read; names are vLLM's.
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
# The engine process imports torch, a program that talks with it does not.
_HOMES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "CompletionOutput": "outputs",
    "Delta": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling.params",
    "StructuredOutputsParams": "sampling.params",
}
__getattr__ = exports(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
