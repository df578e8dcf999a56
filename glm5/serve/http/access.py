"""Access control: the middleware gives every HTTP request an id and a tenant, applies limits, or refuses it.

    wrong Host header                always refused (`glm5.serve.http.hosts`)
    pages, health, /openapi.json     open to all
    /metrics, /v1/loads and others   role "metrics" or "admin", or the only user key: they show values of all tenants
    admin routes                     role "admin"; refused if no key has it
    all other routes                 any key of a user or admin; open to all if the server has no keys

Clients send keys as `Authorization: Bearer KEY` or `x-api-key: KEY`. Each request is logged in one line, without its
content.
"""

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm5.common.log import REQUEST_ID
from glm5.serve.http.call import Call, begin
from glm5.serve.http.errors import ApiError, draining, error_response, main_process_silent
from glm5.serve.http.hosts import Hosts
from glm5.serve.http.keys import ANYONE, KeyRing, Tenant
from glm5.serve.http.limits import Admission
from glm5.serve.metrics.server_metrics import ServerMetrics
from glm5.serve.service.state import ServerState

logger = logging.getLogger(__name__)

ADMIN_PATHS = frozenset(
    {
        "/flush_cache",
        "/start_profile",
        "/stop_profile",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/sleep",
        "/wake_up",
        "/admin/openapi.json",
    }
)
OPEN_PATHS = frozenset({"/", "/dashboard", "/health", "/ready", "/health_generate", "/ping", "/openapi.json"})
_OPEN_PREFIX = "/page/"
_METRICS_PATHS = frozenset({"/metrics", "/get_server_info", "/server_info", "/v1/loads", "/load", "/kv_event_sources"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_SESSION_PATH = re.compile(r"/sessions/([^/]{1,128})(/.+)")
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Access:
    """ASGI middleware around the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        hosts: Hosts,
        admission: Admission,
        routes: Sequence[BaseRoute],
        state: ServerState,
        metrics: ServerMetrics,
    ):
        self.app, self.keys, self.hosts, self.admission = app, keys, hosts, admission
        self.routes, self.state, self.metrics = routes, state, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        session, is_session_path = _session_of(scope, headers)
        call = Call(
            given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex,
            session=session if _VALID_ID.fullmatch(session) else "",
            is_session_path=is_session_path,
        )
        path = scope["path"]
        # Routes of GET answer HEAD too, of which the server sends the headers alone.
        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        sender = _ResponseSender(send, call.id, self.state)
        # Before the last byte goes out, as for `admission`: whoever has an answer finds it in /metrics.
        sender.on_end.append(lambda: self._count(scope, routed, sender.status))
        start, is_open = time.monotonic(), path in OPEN_PATHS or path.startswith(_OPEN_PREFIX)
        bug: int | None = None
        token = REQUEST_ID.set(call.id)
        try:
            self.hosts.check(headers.get("host", ""))
            if is_session_path and not call.session:
                allowed = "1 to 128 printable ASCII characters without white space"
                raise ApiError(
                    400, f"the session's name is {session!r:.60}; allowed: {allowed}", code="invalid_session"
                )
            if is_open:
                await self.app(routed, receive, sender)
            else:
                await self._serve_counted(call, routed, receive, sender)
        except ApiError as error:
            self.metrics.refused.add(1, error.code or str(error.status))
            await error_response(error, path)(scope, receive, sender)
        except Exception:
            bug = 500  # the answer to it is sent outside of this middleware
            raise
        finally:
            if not sender.has_ended:
                self._count(scope, routed, bug)
            status = sender.status if sender.has_ended else bug
            self._log(call, scope, status, time.monotonic() - start, is_open=is_open)
            REQUEST_ID.reset(token)

    async def _serve_counted(self, call: Call, scope: Scope, receive: Receive, send: "_ResponseSender") -> None:
        """Serve a request that a shutdown waits for. Raises ApiError to refuse it."""
        self.state.enter()
        try:
            await self._admit(call, scope)
            # Before the last byte goes out: the client may send its next request before this one's task has ended.
            send.on_end.append(partial(self.admission.leave, call))
            await self.app(scope, receive, send)
        finally:
            self.admission.leave(call)
            self.state.leave()

    async def _admit(self, call: Call, scope: Scope) -> None:
        """Find the tenant and apply its limits. Raises ApiError to refuse the request."""
        call.tenant = self._tenant(scope["path"], Headers(scope=scope))
        if self.state.is_main_silent:
            raise main_process_silent()
        if self.state.is_draining:
            raise draining()
        scope.setdefault("state", {})["tenant"] = call.tenant
        begin(call)
        if scope["method"] == "POST" and scope["path"] not in ADMIN_PATHS:
            await self.admission.enter(call)

    def _tenant(self, path: str, headers: Headers) -> Tenant:
        """The tenant of a request. Raises ApiError 401 or 403 if it has no access to the path."""
        keys, is_admin = self.keys, path in ADMIN_PATHS
        if is_admin and not keys.has_admin:
            how = "start it with --admin-api-key, GLM5_ADMIN_API_KEY or a key of that role in --api-keys-file"
            raise ApiError(403, f"this route needs an admin key, and this server has none: {how}", code="no_admin_key")
        if not is_admin and not keys.is_needed:
            return ANYONE
        tenant = keys.find(_key_of(headers))
        if tenant is None:
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if not self._has_access(tenant, path):
            needed = "admin" if is_admin else "metrics or admin" if path in _METRICS_PATHS else "user or admin"
            message = f"the role of this API key is {tenant.role}; allowed on this route: {needed}"
            raise ApiError(403, message, code="forbidden")
        return tenant

    def _has_access(self, tenant: Tenant, path: str) -> bool:
        if path in ADMIN_PATHS:
            return tenant.role == "admin"
        if path in _METRICS_PATHS:
            return tenant.role != "user" or self.keys.num_users == 1
        return tenant.role != "metrics"

    def _route(self, scope: Scope) -> str:
        """The path of the request's route, also if the request was refused before it came there."""
        if (route := scope.get("route")) is None:
            route = next((each for each in self.routes if each.matches(scope)[0] is Match.FULL), None)
        return getattr(route, "path", "none")

    def _count(self, scope: Scope, routed: Scope, status: int | None) -> None:
        """Count a request. `status` None: its client left before the end of the answer."""
        kind = "left" if status is None else f"{status // 100}xx"
        self.metrics.http.add(1, _method(scope), self._route(routed), kind)

    def _log(self, call: Call, scope: Scope, status: int | None, seconds: float, *, is_open: bool) -> None:
        level = logging.DEBUG if is_open or scope["path"] in _METRICS_PATHS else logging.INFO
        # The path stays percent-encoded: a decoded one may contain line feeds.
        path, fields = scope["raw_path"].decode("ascii", "replace"), {"tenant": call.tenant.name, "seconds": seconds}
        caller = f" {call.tenant.name}" if call.tenant.name else ""
        if call.session:
            caller, fields = f"{caller} session {call.session}", {**fields, "session": call.session}
        logger.log(level, "%s %s %s%s %.3f s", _method(scope), path, status or "left", caller, seconds, extra=fields)


def _session_of(scope: Scope, headers: Headers) -> tuple[str, bool]:
    """The session that the path begins with, which is taken out of it (True), or that the header names."""
    if (found := _SESSION_PATH.fullmatch(scope["path"])) is None:
        return headers.get("x-session-id", ""), False
    name, scope["path"] = found.groups()
    return name, True


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "other"


class _ResponseSender:
    """Records the status of a response and adds common headers. `on_end`: called before the last part of the body."""

    def __init__(self, send: Send, request_id: str, state: ServerState):
        self._send, self._request_id, self._state = send, request_id, state
        self.status: int | None = None
        self.on_end: list[Callable[[], None]] = []
        self.has_ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._request_id
            if self._state.is_draining:
                headers["Connection"] = "close"
        elif not message.get("more_body", False):
            self.has_ended = True
            while self.on_end:
                self.on_end.pop(0)()  # they know this object: what is kept would be garbage for the collector
        await self._send(message)


def _key_of(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
