"""The two OpenAPI documents: /openapi.json has the public routes, /admin/openapi.json those of the operator."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

router = APIRouter(include_in_schema=False)

ADMIN = "admin"
"""The tag of routes that only an admin's key opens."""


@router.get("/admin/openapi.json")
async def admin_document(request: Request) -> dict[str, Any]:
    """The document of the admin routes."""
    return _document(request.app, "glm5 admin", [route for route in request.app.routes if is_admin(route)])


def install(app: FastAPI) -> None:
    """Keep the admin routes out of the application's own document, and put them into one of theirs."""
    app.include_router(router)

    def public() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, app.title, [route for route in app.routes if not is_admin(route)])
        return app.openapi_schema

    app.openapi = public  # FastAPI's way to bring an own document


def is_admin(route: BaseRoute) -> bool:
    """Whether only an admin may use it."""
    return ADMIN in getattr(route, "tags", ())


def _document(app: FastAPI, title: str, routes: list[BaseRoute]) -> dict[str, Any]:
    document = get_openapi(title=title, version=app.version, routes=routes)
    scheme = {"type": "http", "scheme": "bearer"}
    document.setdefault("components", {})["securitySchemes"] = {"key": scheme}
    document["security"] = [{"key": []}]
    return document
