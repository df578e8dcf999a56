"""Errors as clients expect them, in the envelope of the API whose path was asked for.

OpenAI, SGLang    {"error": {"message", "type", "param", "code"}}
Anthropic         {"type": "error", "error": {"type", "message", "param", "code"}, "request_id"}
"""

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
_MAX_MESSAGE, _MAX_PARAM = 800, 200  # characters: a refusal does not send a long request back
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
    """An answer other than 200. `param` is the offending field of the body, `code` a word that programs can test.
    `retry_after`: seconds after which it may be another answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after
        self.message = _shortened(message, _MAX_MESSAGE)
        self.param = None if param is None else _shortened(param, _MAX_PARAM)


def draining() -> ApiError:
    """The refusal of a server that is about to end."""
    return ApiError(503, "the server is about to end and takes no more requests", code="draining", retry_after=1)


def _shortened(text: str, most: int) -> str:
    """Its beginning and its end, which say what is wrong and what is allowed."""
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


@contextmanager
def named(names: Mapping[str, str], kind: str = "") -> Iterator[None]:
    """Refusals of parameters under the names that the client knows them by: {ours: the client's}."""
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
    """What a client is told about an exception. A bug of ours is for the log, not for the client."""
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
            (_, *path), value, allowed = complaint(error.errors()[0])  # what comes first is "query" or "path"
            param = ".".join(path)
            return ApiError(400, f"{param} is {value!r:.60}; allowed: {allowed}", param=param)
        case HTTPException():
            code = HTTPStatus(error.status_code).name.lower()
            return ApiError(error.status_code, str(error.detail), code=code)
        case _:
            return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def envelope(error: ApiError) -> dict[str, Any]:
    """The body of an error, as OpenAI writes it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_envelope(error: ApiError) -> dict[str, Any]:
    """The body of an error, as Anthropic writes it. `param` and `code` are there where they say something."""
    general = "api_error" if error.status >= 500 else "invalid_request_error"
    told = {"type": _ANTHROPIC_TYPES.get(error.status, general), "message": error.message}
    more = {name: value for name, value in (("param", error.param), ("code", error.code)) if value is not None}
    return {"type": "error", "error": told | more, "request_id": REQUEST_ID.get()}


def error_response(error: Exception, path: str = "") -> JSONResponse:
    """The answer that an exception becomes for who asked for `path`."""
    told = to_api_error(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if told.retry_after is not None:
        headers["Retry-After"] = str(told.retry_after)
    write = anthropic_envelope if path.startswith(ANTHROPIC_PATH) else envelope
    return JSONResponse(write(told), told.status, headers=headers)


def install(app: FastAPI) -> None:
    """Every error of every route leaves in the envelope; uvicorn logs those that nobody expected."""

    async def respond(request: Request, error: Exception) -> JSONResponse:
        return error_response(error, request.url.path)

    for kind in (ApiError, RequestError, MissingExtra, EngineDead, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, respond)
