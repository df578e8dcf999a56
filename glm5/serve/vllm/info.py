"""vLLM's small routes about the server itself."""

from typing import Any

from fastapi import APIRouter, Depends

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
