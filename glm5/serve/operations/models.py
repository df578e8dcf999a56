"""GET /v1/models, with the fields of OpenAI's API and of Anthropic's."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Depends

from glm5.serve.http.body import documented, no_such_model
from glm5.serve.service.service import Service, get_service

router = APIRouter()


@router.get("/v1/models")
async def models(service: Service = Depends(get_service)) -> dict[str, Any]:
    """The names that the model is served under."""
    names = service.model_names
    return {
        "object": "list",
        "data": [_card(name, service) for name in names],
        "first_id": names[0],
        "last_id": names[-1],
        "has_more": False,
    }


@router.get("/v1/models/{name:path}", responses=documented(404))
async def model(name: str, service: Service = Depends(get_service)) -> dict[str, Any]:
    """One of the names that the model is served under."""
    if name not in service.model_names:
        raise no_such_model(name, service)
    return _card(name, service)


def _card(name: str, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
        "object": "model",
        "created": service.created,
        "owned_by": "glm5",
        "root": service.root,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }
