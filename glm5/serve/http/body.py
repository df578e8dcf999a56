"""Bodies of requests: read completely, then validated by a pydantic model.

A field that this server knows and cannot honour is refused by name, unless it says what happens anyway; ignoring it
would give an answer that the client did not ask for. A field that it does not know is ignored and logged once.
"""

import asyncio
import json
import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from glm5.config.refusal import first_error
from glm5.serve.http.call import current
from glm5.serve.http.errors import ApiError
from glm5.serve.service.service import Service

logger = logging.getLogger(__name__)

MAX_NESTING = 128  # what is written by people nests less, and what looks through it may recurse
# Limits of a body besides its texts: parsing is one call, during which no other request is served.
MAX_VALUES = 1 << 21  # values of lists and objects: token ids, ten times what a context holds
MAX_PARTS = 1 << 18  # lists, objects, and fields of objects, which take ten times as long
MAX_LOGGED = 100  # different lines about what clients send, which may invent any number
_LARGE = 1 << 16  # bytes from which on a body is parsed in a thread, to keep the event loop free
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SEPARATORS, _PARTS = (b",",), (b"[", b"{", b":")


_ERRORS = {
    400: "A field is missing or wrong, or asks for what this server cannot do: `param` names it",
    401: "No valid API key",
    403: "The key is of another role",
    404: "No such model, or nothing of this name",
    408: "The body was not whole in time",
    413: "The body is too large",
    415: "The body is of another type than application/json",
    429: "Too many requests; Retry-After says when to come back",
    503: "The engine is not running",
}


class StrictModel(BaseModel):
    """No value is converted to a field's type."""

    model_config = ConfigDict(strict=True)


class Body(StrictModel):
    """Base of all bodies. null counts as not given.

    `refused`: fields that are known and not supported, with the values that change nothing, the first of which is
    named in the refusal. `refusal_codes`: codes by which clients know some of these refusals. `meaningless`: fields
    that say nothing about the answer.
    """

    model_config = ConfigDict(extra="allow")
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    refusal_codes: ClassVar[Mapping[str, str]] = {}
    meaningless: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None
    """One of the served names; the first of them if it is not given."""


B = TypeVar("B", bound=Body)


async def body_of(kind: type[B], request: Request) -> tuple[B, Service]:
    """A request's body, checked as far as it can be without a model, and the service that answers it."""
    service: Service = request.app.state.service
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Also keeps web pages of other origins out: browsers ask before they send this type, and are not let in.
        got = f"content-type is {content_type!r:.60}"
        raise ApiError(415, f"{got}; allowed: application/json", code="unsupported_media_type")
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        got = f"content-encoding is {encoding!r:.60}"
        raise ApiError(415, f"{got}; allowed: none, as bodies are read as they come", code="unsupported_media_type")
    raw = await request.body()  # how large it may be is not for a route to say (incoming.py)
    if (call := current()) is not None:
        call.num_bytes = len(raw)
    if len(raw) <= _LARGE:
        body = parse(kind, raw)
    else:
        body = await asyncio.to_thread(parse, kind, raw)
    if body.model is not None and body.model not in service.model_names and not _has_session(service):
        raise no_such_model(body.model, service)
    log_unknown(body, service)
    return body, service


def _has_session(service: Service) -> bool:
    """Whether an agent asks in a session: some agents cannot be told a model's name, and there is one model."""
    call = current()
    return service.sessions is not None and call is not None and bool(call.session)


def no_such_model(name: str, service: Service) -> ApiError:
    """The refusal of a name that the model is not served under."""
    message = f"the model {name!r:.200} does not exist; allowed: {', '.join(service.model_names)}"
    return ApiError(404, message, param="model", code="model_not_found")


def parse(kind: type[B], raw: bytes) -> B:
    """A body of this kind. Raises ApiError."""
    _refuse_many(raw)
    try:
        text = raw.decode("utf-8-sig")
        content = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        message = f"the body is not JSON: {error}"
        if "sys.set_int_max_str_digits" in message:  # words for Python's programmers
            message = f"the body has an integer of more than {sys.get_int_max_str_digits()} digits"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, f"the body is a JSON {type(content).__name__}; expected an object", code="invalid_json")
    if _depth(content) > MAX_NESTING:
        raise _too_deep()
    if _SURROGATE.search(text):
        _refuse_halves(content)
    return checked(kind, content)


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested more than {MAX_NESTING} deep", code="invalid_json")


def checked(kind: type[B], content: Mapping[str, Any], where: str = "") -> B:
    """Fields as a body of this kind. `where` is put before their names. Raises ApiError."""
    given = {name: value for name, value in content.items() if value is not None}
    for name, harmless in kind.refused.items():
        if name in given and not any(_same(given[name], value) for value in harmless):
            allowed = f"; allowed: {json.dumps(harmless[0])}" if harmless else ""
            param = where + name
            message = f"{param} is not supported by this server: leave it out{allowed}"
            raise ApiError(400, message, param=param, code=kind.refusal_codes.get(name))
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        path, value, allowed = first_error(error)
        param = where + ".".join(path)
        got = "is missing" if allowed == "it must be given" else f"is {value!r:.60}; allowed: {allowed}"
        raise ApiError(400, f"{param} {got}", param=param) from None


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route says of its errors in the OpenAPI document."""
    return {status: {"description": _ERRORS[status], "content": {"application/json": {}}} for status in statuses}


def described(kind: type[Body], *, streams: bool = False) -> dict[str, Any]:
    """What a route says of its body, and of the answers to it, in the OpenAPI document."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(one) for one in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(definitions[node["$ref"].rpartition("/")[2]])
        return {key: inlined(value) for key, value in node.items()}

    content = {"application/json": {"schema": inlined(schema)}}
    types: dict[str, Any] = {"application/json": {}} | ({"text/event-stream": {}} if streams else {})
    answered = {"200": {"description": "The answer", "content": types}}
    refused = {str(status): what for status, what in documented(*_ERRORS).items()}
    return {"requestBody": {"required": True, "content": content}, "responses": answered | refused}


def _same(given: Any, value: Any) -> bool:
    """Whether both are the same in JSON, where 1 is 1.0 but not true."""
    return given == value and isinstance(given, bool) == isinstance(value, bool)


def _depth(content: Any) -> int:
    """How deep lists and objects lie in each other; more than is allowed is enough to know."""
    level, depth = [content], 0
    while level and depth <= MAX_NESTING:
        depth += 1
        inner = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
        level = [child for child in inner if isinstance(child, (dict, list))]
    return depth


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is larger than any number that is read here")
    return number


def _refuse_many(raw: bytes) -> None:
    """Raises ApiError for a body of so many values that parsing it would block other requests."""
    for separators, most, what in (
        (_SEPARATORS, MAX_VALUES, "values in lists and objects"),
        (_PARTS, MAX_PARTS, "lists, objects and fields"),
    ):
        if sum(map(raw.count, separators)) > most and _holds_more(raw, separators, most):
            raise ApiError(
                400, f"the body holds more than {most} {what}; send several requests", code="body_too_complex"
            )


def _holds_more(raw: bytes, separators: Sequence[bytes], most: int) -> bool:
    """Whether there are more of them outside of texts."""
    count = end = 0
    for text in _TEXT.finditer(raw):
        count += sum(raw.count(separator, end, text.start()) for separator in separators)
        if count > most:
            return True
        end = text.end()
    return count + sum(raw.count(separator, end) for separator in separators) > most


def _refuse_halves(content: Mapping[str, Any]) -> None:
    """Half of a surrogate pair has no UTF-8 form: it can neither be encoded nor sent on."""
    for name, value in content.items():
        try:
            f"{name}{json.dumps(value, ensure_ascii=False)}".encode()
        except UnicodeEncodeError as error:
            found = error.object[error.start]
            message = f"the text holds an unpaired surrogate {found!r}: it is not valid Unicode, remove it"
            raise ApiError(400, message, param=name.encode(errors="replace").decode()) from None


def log_unknown(body: Body, service: Service, where: str = "") -> None:
    """Log unknown fields, each once."""
    known = body.refused.keys() | body.meaningless
    for name in body.model_extra or ():
        if len(service.logged) >= MAX_LOGGED:
            return
        if name not in known:
            log_once(
                f"requests have a field {where + name!r:.100}, which this server does not know and ignores", service
            )


def log_once(message: str, service: Service) -> None:
    """Log what many requests may have in common, once."""
    if message not in service.logged and len(service.logged) < MAX_LOGGED:
        service.logged.add(message)
        logger.warning("%s", message)
