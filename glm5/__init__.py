"""GLM-5 (`glm_moe_dsa`): the architecture, its checkpoints, chat format, engine and server.

    glm5.load(PATH_OR_ID)                 a model with .logits(token_ids)
    glm5.LLM(PATH_OR_ID).generate(...)    text from prompts, with glm5.SamplingParams
    glm5.AsyncEngine                      the same under asyncio

Importing this does no work and imports no torch: each name below is fetched when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5.checkpoint import load
    from glm5.engine import LLM, AsyncEngine, SamplingParams

__version__ = "0.1.0"

_MODULES = {
    "load": "glm5.checkpoint",
    "LLM": "glm5.engine",
    "SamplingParams": "glm5.engine",
    "AsyncEngine": "glm5.engine",
}
__all__ = ["LLM", "AsyncEngine", "SamplingParams", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'glm5' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
