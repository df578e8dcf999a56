"""GET /v1/models."""

from typing import Any

from fastapi import APIRouter, Depends

from glm5.serve.body import documented, no_such_model
from glm5.serve.service import Service, get_service

router = APIRouter()


@router.get("/v1/models")
async def models(service: Service = Depends(get_service)) -> dict[str, Any]:
    """The names that the model is served under."""
    return {"object": "list", "data": [_card(name, service) for name in service.model_names]}


@router.get("/v1/models/{name:path}", responses=documented(404))
async def model(name: str, service: Service = Depends(get_service)) -> dict[str, Any]:
    """One of the names that the model is served under."""
    if name not in service.model_names:
        raise no_such_model(name, service)
    return _card(name, service)


def _card(name: str, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "glm5",
        "root": service.root,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }
