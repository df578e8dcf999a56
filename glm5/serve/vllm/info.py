"""vLLM's small routes about the server itself, and its sources of KV events."""

from typing import Any

from fastapi import APIRouter, Depends, Request

from glm5 import __version__
from glm5.serve.service.service import Service, get_service

router = APIRouter(tags=["info"])


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this server."""
    return {"version": __version__}


@router.get("/is_sleeping")
async def is_sleeping(service: Service = Depends(get_service)) -> dict[str, Any]:
    """Whether /sleep or /release_memory_occupation has released memory that is not all allocated again."""
    return {"is_sleeping": (await service.engine.stats())["is_sleeping"]}


@router.get("/load")
async def load(service: Service = Depends(get_service)) -> dict[str, int]:
    """How many requests run: those whose answer is being computed, or waits."""
    return {"server_load": service.running.count}


@router.get("/kv_event_sources")
async def kv_event_sources(request: Request, service: Service = Depends(get_service)) -> list[dict[str, Any]]:
    """Where routers subscribe to events of the KV cache; none without --kv-events-config."""
    source = service.engine.info.kv_events
    if source is None:
        return []
    host = request.url.hostname or "localhost"
    return [
        {
            "data_parallel_rank": 0,
            "endpoint": reachable(source.endpoint, host),
            "replay_endpoint": source.replay_endpoint and reachable(source.replay_endpoint, host),
            "topic": source.topic,
        }
    ]


def reachable(endpoint: str, host: str) -> str:
    """The endpoint for a client that reaches this server under `host`: an engine that listens on every address does not
    know which of them a router can reach."""
    scheme, _, rest = endpoint.partition("://")
    own, colon, port = rest.rpartition(":")
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}{colon}{port}" if scheme == "tcp" and own in ("0.0.0.0", "[::]") else endpoint
