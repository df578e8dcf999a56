"""Routes of OpenAI's and Anthropic's services that this server does not have: refused by their names.

A plain 404 would look like a wrong address.
"""

from fastapi import APIRouter, Request

from glm5.serve.http.errors import ApiError

NAMES = ("embeddings", "moderations", "images", "files", "batches", "messages/batches")

router = APIRouter(include_in_schema=False)


async def not_served(request: Request) -> None:
    """404 that names what was asked for."""
    name = next(name for name in NAMES if request.url.path.startswith(f"/v1/{name}"))
    what = name.rpartition("/")[2]
    message = f"this server has no {what}, as it serves a language model alone; /openapi.json lists its routes"
    raise ApiError(404, message, code="not_served")


for name in NAMES:
    for path in (f"/v1/{name}", f"/v1/{name}/{{rest:path}}"):
        router.add_api_route(path, not_served, methods=["GET", "POST", "DELETE"])
