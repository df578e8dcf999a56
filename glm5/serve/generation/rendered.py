"""vLLM's answer of the render routes: a request as the engine gets it, in token ids, without running it.

Routers that match prefixes by token ids ask for it, and other servers can be given it to generate from.
"""

from typing import Any

import msgspec

from glm5.serve.generation.job import Job
from glm5.serve.service.service import Service


def rendered(job: Job, body: Any, service: Service) -> dict[str, Any]:
    """The job of a chat or completion `body` in the form of vLLM's GenerateRequest."""
    return {
        "request_id": job.id,
        "token_ids": list(job.prompt_ids),
        "features": None,
        "sampling_params": msgspec.to_builtins(job.params),
        "model": body.model or service.model_names[0],
        "stream": bool(body.stream),
        "stream_options": body.stream_options if body.stream else None,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "kv_transfer_params": None,
    }
