"""Requests to tokens.

llm       prompts in, answers out: `LLM`                 async_engine   the same under asyncio, on a thread of its own
loop      which requests run in the next step            request, text, stop   one answer as it grows
sampler   logits to tokens                               cache          pages of keys, and the model's view of them
defaults  what generation_config.json asks for           capacity       how many pages fit

`params` and `outputs` are what callers write and read; names are vLLM's.
"""

from glm5.engine.async_engine import AsyncEngine, EngineStopped
from glm5.engine.llm import LLM
from glm5.engine.outputs import CompletionOutput, Delta, RequestOutput
from glm5.engine.params import SamplingParams

__all__ = ["LLM", "AsyncEngine", "CompletionOutput", "Delta", "EngineStopped", "RequestOutput", "SamplingParams"]
