"""What the web pages of all servers share: style sheet and icon in `static/`, and the headers that keep pages safe.

The content security policy allows only resources of the same server and forbids running text as code; trusted types
make the browser refuse `innerHTML` and similar properties.
"""

from importlib.resources import files

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def page_file(name: str, package: str) -> tuple[bytes, str] | None:
    """Content and media type of a file in the package's folder `static`, or of a shared one; None for other names."""
    # Only names in the folders' listings are found, so no path can lead out of them.
    for folder in (package, "glm5.common"):
        found = {entry.name: entry for entry in files(folder).joinpath("static").iterdir()}.get(name)
        kind = _TYPES.get(name.rpartition(".")[2])
        if found is not None and kind is not None:
            return found.read_bytes(), kind
    return None
