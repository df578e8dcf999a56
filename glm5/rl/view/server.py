"""A small server of a run's pages, for one reader on the same machine: the standard library's, without scripts."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from glm5.common.errors import GlmError
from glm5.common.pages import HEADERS, POLICY, page_file
from glm5.rl.view.pages import NoPage, RunPages
from glm5.rl.view.render import render

logger = logging.getLogger(__name__)


MAX_FORM = 2**18
"""Bytes."""
_HEADERS = HEADERS | {"Content-Security-Policy": POLICY.replace("form-action 'none'", "form-action 'self'")}


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of pages, style sheets and the icon; POST of verdicts."""

    pages: RunPages
    timeout = 30  # seconds that a connection may stand still

    def do_GET(self) -> None:
        status, content, kind = self._answer()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """A verdict; the answer leads to the next page."""
        length = self.headers.get("Content-Length", "")
        try:
            if not length.isdigit() or int(length) > MAX_FORM:
                raise ValueError(f"a form of more than {MAX_FORM} bytes")
            text = self.rfile.read(int(length)).decode()
            form = dict(parse_qsl(text, max_num_fields=10, keep_blank_values=True))
            place = self.pages.rate([unquote(part) for part in urlsplit(self.path).path.split("/") if part], form)
        except (NoPage, ValueError, GlmError, OSError) as error:
            logger.debug("a refused form: %r", error)
            self.close_connection = True
            self.send_error(400)
            return
        self.send_response(303)
        self.send_header("Location", place)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)

    def _answer(self) -> tuple[int, bytes, str]:
        """Status, content and media type."""
        try:
            address = urlsplit(self.path)
            path = [unquote(part) for part in address.path.split("/") if part]
            query = dict(parse_qsl(address.query, max_num_fields=10))
            if len(path) == 2 and path[0] == "page":
                if (file := page_file(path[1], "glm5.rl.view")) is None:
                    raise NoPage
                return 200, *file
            return 200, self.pages.page(path, query).encode("utf-8", "replace"), "text/html"
        except (NoPage, ValueError):  # urllib's errors are ValueErrors
            return 404, render("message", text="There is no such page.").encode(), "text/html"
        except GlmError as error:
            return 500, render("message", text=str(error)).encode("utf-8", "replace"), "text/html"


@contextmanager
def serving(out: Path, host: str, port: int) -> Iterator[ThreadingHTTPServer]:
    """A server of the run in `out`, listening; the caller calls `serve_forever`. Raises GlmError."""
    if not (out / "recipe.json").is_file():
        raise GlmError(f"{out} is no folder of a run of glm5 rl: it has no recipe.json")
    try:
        server = ThreadingHTTPServer((host, port), type("Handler", (_Handler,), {"pages": RunPages(out)}))
    except OSError as error:
        raise GlmError(f"{host}, port {port}: {error.strerror or error}; --port 0 takes any free one") from None
    server.daemon_threads = True
    with server:
        yield server
