"""GET /v1/models and GET /health."""

from typing import Any

from fastapi import APIRouter, Depends, Response

from glm5.serve.errors import ApiError
from glm5.serve.service import Service, get_service

router = APIRouter()


@router.get("/v1/models")
async def models(service: Service = Depends(get_service)) -> dict[str, Any]:
    """The names that the model is served under."""
    cards = [
        {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "glm5",
            "root": service.root,
            "max_model_len": service.engine.max_model_len,
        }
        for name in service.model_names
    ]
    return {"object": "list", "data": cards}


@router.get("/health")
async def health(service: Service = Depends(get_service)) -> Response:
    """200 while requests are served; 503 with the reason before and after."""
    if (reason := service.engine.stopped_because) is not None:
        raise ApiError(503, f"the engine is not running: {reason}", code="engine_stopped")
    return Response()
