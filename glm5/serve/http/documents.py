"""The two OpenAPI documents: /openapi.json has the public routes, /admin/openapi.json the admin routes."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi

from glm5.serve.http.access import OPEN_PATHS
from glm5.serve.http.body import documented

router = APIRouter(include_in_schema=False)

ADMIN = "admin"
"""The tag of routes that need an admin key."""


@router.get("/admin/openapi.json")
async def admin_document(request: Request) -> dict[str, Any]:
    """The document of the admin routes."""
    return document(request.app, is_admin=True)


def install(app: FastAPI) -> None:
    """Move the admin routes from the application's OpenAPI document into a separate one."""
    app.include_router(router)

    def public() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(app, is_admin=False)
        return app.openapi_schema

    app.openapi = public  # how FastAPI lets an application replace its document


def document(app: FastAPI, *, is_admin: bool) -> dict[str, Any]:
    """The OpenAPI document of the admin routes, or of all others."""
    title = f"{app.title} admin" if is_admin else app.title
    spec = get_openapi(title=title, version=app.version, routes=app.routes)
    for path, operations in list(spec["paths"].items()):
        if any((ADMIN in operation.get("tags", ())) != is_admin for operation in operations.values()):
            del spec["paths"][path]
            continue
        for operation in operations.values():
            _complete(operation, is_open=path in OPEN_PATHS)
            if is_admin and (body := operation.get("requestBody")) is not None:
                body["required"] = "required" in _schema(body)
                _schema(body)["additionalProperties"] = False
    spec["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    spec["security"] = [{"key": []}]
    return spec


def _complete(operation: dict[str, Any], *, is_open: bool) -> None:
    """Add the statuses that the middleware returns. FastAPI's own 422 is 400 here (`errors`)."""
    responses = operation["responses"]
    refused = documented(503) if is_open else documented(401, 403, 503)
    if responses.pop("422", None) is not None:
        refused |= documented(400)
    operation["responses"] = dict(sorted(({str(status): what for status, what in refused.items()} | responses).items()))
    if is_open:
        operation["security"] = []


def _schema(body: dict[str, Any]) -> dict[str, Any]:
    return body["content"]["application/json"]["schema"]
