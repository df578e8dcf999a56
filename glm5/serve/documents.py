"""The two OpenAPI documents: /openapi.json has the public routes, /admin/openapi.json those of the operator."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi

router = APIRouter(include_in_schema=False)

ADMIN = "admin"
"""The tag of routes that only an admin's key opens."""


@router.get("/admin/openapi.json")
async def admin_document(request: Request) -> dict[str, Any]:
    """The document of the admin routes."""
    return _document(request.app, "glm5 admin", is_admin=True)


def install(app: FastAPI) -> None:
    """Keep the admin routes out of the application's own document, and put them into one of theirs."""
    app.include_router(router)

    def public() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, app.title, is_admin=False)
        return app.openapi_schema

    app.openapi = public  # FastAPI's way to bring an own document


def _document(app: FastAPI, title: str, *, is_admin: bool) -> dict[str, Any]:
    document = get_openapi(title=title, version=app.version, routes=app.routes)
    for path, operations in list(document["paths"].items()):
        if any((ADMIN in operation.get("tags", ())) != is_admin for operation in operations.values()):
            del document["paths"][path]
    document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    return document
