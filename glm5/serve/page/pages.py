"""The pages for people: chat at `/`, live figures at `/dashboard`, and their static files under `/page/`.

The files lie in `glm5/serve/page`, as they are sent: no build step. Browsers keep them and ask each time whether they
are still current, so an upgraded server never meets an old script. The policy lets a page load from this server alone
and forbids every way to run text as code; trusted types make the browser refuse `innerHTML` and its like.
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
    # The names that the folder has are all that exists, so no name can lead out of it.
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
    # Starlette sends no body in answer to HEAD, with the length that GET would have.
    return Response(content, media_type=kind, headers=headers)
