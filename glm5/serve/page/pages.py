"""The web pages: chat at `/`, live metrics at `/dashboard`, and their static files under `/page/`.

The files in `glm5/serve/page` are sent as they are, without a build step. Browsers cache and revalidate them each time,
so an upgraded server never runs with an old script.
"""

import hashlib

from fastapi import APIRouter, HTTPException, Request, Response

from glm5.common.pages import HEADERS, page_file

router = APIRouter(include_in_schema=False)


@router.get("/")
def chat_page(request: Request) -> Response:
    """The chat page."""
    return _file("index.html", request)


@router.get("/dashboard")
def dashboard_page(request: Request) -> Response:
    """The dashboard."""
    return _file("dashboard.html", request)


@router.get("/page/{name}")
def static_file(name: str, request: Request) -> Response:
    """A style sheet, script or picture of the pages; 404 for any other name."""
    return _file(name, request)


def _file(name: str, request: Request) -> Response:
    found = page_file(name, "glm5.serve.page")
    if found is None:
        raise HTTPException(404, f"there is no page {request.url.path}")
    content, kind = found
    tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    headers = {**HEADERS, "ETag": tag}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("If-None-Match", "").split(",")]
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)
