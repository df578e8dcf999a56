"""The web pages: chat at `/`, live metrics at `/dashboard`, and their static files under `/page/`.

The files in `glm5/serve/page` are sent as they are, without a build step. Browsers cache and revalidate them each time,
so an upgraded server never runs with an old script. The content security policy allows only resources of this server
and forbids running text as code; trusted types make the browser refuse `innerHTML` and similar properties.
"""

import hashlib
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request, Response

router = APIRouter(include_in_schema=False)

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.api_route("/", methods=["GET", "HEAD"])
def chat_page(request: Request) -> Response:
    """The chat page."""
    return _file("index.html", request)


@router.api_route("/dashboard", methods=["GET", "HEAD"])
def dashboard_page(request: Request) -> Response:
    """The dashboard."""
    return _file("dashboard.html", request)


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
def static_file(name: str, request: Request) -> Response:
    """A style sheet, script or picture of the pages; 404 for any other name."""
    return _file(name, request)


def _file(name: str, request: Request) -> Response:
    # Only names in the folder's listing are served, so no path can lead out of it.
    found = {entry.name: entry for entry in files("glm5.serve.page").joinpath("static").iterdir()}.get(name)
    kind = _TYPES.get(name.rpartition(".")[2])
    if found is None or kind is None:
        raise HTTPException(404, f"there is no page {request.url.path}")
    content = found.read_bytes()
    tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    headers = {**_HEADERS, "ETag": tag}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("If-None-Match", "").split(",")]
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    # For HEAD, Starlette sends the headers of GET without the body.
    return Response(content, media_type=kind, headers=headers)
