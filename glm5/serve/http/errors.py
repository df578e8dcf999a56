"""Error responses, in the JSON format of the API whose path was requested.

OpenAI, SGLang    {"error": {"message", "type", "param", "code"}}
Anthropic         {"type": "error", "error": {"type", "message", "param", "details": {"error_code"}}, "request_id"}
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from glm5.common.errors import EngineDead, MissingExtra, RequestError
from glm5.common.log import REQUEST_ID
from glm5.config.refusal import complaint

ANTHROPIC_PATH = "/v1/messages"
_MAX_MESSAGE, _MAX_PARAM = 800, 200  # characters: an error response does not repeat a long request
# Messages are written for callers from Python too; whoever sends JSON reads JSON's words, except in quoted texts.
_WORDS = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|\b(?:None|True|False)\b""")
_JSON = {"None": "null", "True": "true", "False": "false"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error response. `param` is the invalid field of the body, `code` a constant that programs can test.
    `retry_after`: seconds after which the client may try again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        message = _WORDS.sub(lambda found: _JSON.get(found[0], found[0]), message)
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after
        self.message = _shortened(message, _MAX_MESSAGE)
        self.param = None if param is None else _shortened(param, _MAX_PARAM)


def draining() -> ApiError:
    """The refusal of new requests while the server drains."""
    return ApiError(503, "the server is shutting down and accepts no more requests", code="draining", retry_after=1)


def main_process_silent() -> ApiError:
    """The refusal of requests by a front end whose main process does not answer."""
    message = "the server's main process does not answer: it was stopped or hangs; if it stays so, restart the server"
    return ApiError(503, message, code="main_process_silent", retry_after=5)


def _shortened(text: str, most: int) -> str:
    """Cuts the middle out of a long text: its beginning names what is wrong, its end what is allowed."""
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


@contextmanager
def named(names: Mapping[str, str], kind: str = "") -> Iterator[None]:
    """Rename parameters in a RequestError to the API's names: {our name: the API's name}."""
    try:
        yield
    except RequestError as error:
        ours = error.param
        if ours is None or ours not in names:
            raise
        theirs, message = names[ours], str(error)
        for prefix in (f"{ours}.{kind}" if kind else ours, ours):
            if message.startswith(prefix):
                message = theirs + message.removeprefix(prefix)
                break
        raise RequestError(message, theirs) from None


def to_api_error(error: Exception) -> ApiError:
    """The error response for an exception. It hides the message of an unexpected one, which the log has."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case MissingExtra():
            return ApiError(400, str(error), code="not_installed")
        case EngineDead():
            return ApiError(503, str(error), code="engine_stopped")
        case RequestValidationError():
            (_, *path), value, allowed = complaint(error.errors()[0])  # the first part is "query" or "path"
            param = ".".join(path)
            return ApiError(400, f"{param} is {value!r:.60}; allowed: {allowed}", param=param)
        case HTTPException():
            code = HTTPStatus(error.status_code).name.lower()
            return ApiError(error.status_code, str(error.detail), code=code)
        case _:
            return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def envelope(error: ApiError) -> dict[str, Any]:
    """The body of an error response in OpenAI's format."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_envelope(error: ApiError) -> dict[str, Any]:
    """The body of an error response in Anthropic's format, with `param` and the code if they are set."""
    general = "api_error" if error.status >= 500 else "invalid_request_error"
    content = {"type": _ANTHROPIC_TYPES.get(error.status, general), "message": error.message}
    details = None if error.code is None else {"error_code": error.code}
    more = {name: value for name, value in (("param", error.param), ("details", details)) if value is not None}
    return {"type": "error", "error": content | more, "request_id": REQUEST_ID.get()}


def error_response(error: Exception, path: str = "") -> JSONResponse:
    """The response for an exception on a request to `path`."""
    api_error = to_api_error(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if api_error.retry_after is not None:
        headers["Retry-After"] = str(api_error.retry_after)
    write = anthropic_envelope if path.startswith(ANTHROPIC_PATH) else envelope
    return JSONResponse(write(api_error), api_error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Install handlers that give every error of every route this format; uvicorn logs unexpected ones."""

    async def respond(request: Request, error: Exception) -> JSONResponse:
        return error_response(error, request.url.path)

    for kind in (ApiError, RequestError, MissingExtra, EngineDead, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, respond)
