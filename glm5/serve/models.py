"""GET /v1/models."""

from typing import Any

from fastapi import APIRouter, Depends

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
