"""The way in: every HTTP request gets an id, a caller and its places, or is turned away, before a route sees it.

    another server's name            nobody (`glm5.serve.http.hosts`)
    pages, health, /openapi.json     anyone
    /metrics, /get_server_info       the role "metrics" or "admin", or the only user: they tell of all callers
    admin routes                     the role "admin"; nobody where no key has it
    everything else                  any user's key, if there are keys

Keys come as `Authorization: Bearer KEY` or `x-api-key: KEY`. One line of log for each request, without its content.
"""

import logging
import re
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm5.common.log import REQUEST_ID
from glm5.serve.http.call import Call, begin
from glm5.serve.http.errors import ApiError, draining, error_response
from glm5.serve.http.hosts import Hosts
from glm5.serve.http.keys import ANYONE, KeyRing, Tenant
from glm5.serve.http.limits import Limits
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
_OPEN_FOLDER = "/page/"
_WATCHED = frozenset({"/metrics", "/get_server_info", "/server_info"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Access:
    """ASGI middleware around the application."""

    def __init__(
        self, app: ASGIApp, *, keys: KeyRing, hosts: Hosts, limits: Limits, state: ServerState, metrics: ServerMetrics
    ):
        self.app, self.keys, self.hosts, self.limits = app, keys, hosts, limits
        self.state, self.metrics = state, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, headers = scope["path"], Headers(scope=scope)
        given = headers.get("x-request-id", "")
        call = Call(given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex)
        sending = _Sending(send, call.id, self.state)
        start, is_open = time.monotonic(), path in OPEN_PATHS or path.startswith(_OPEN_FOLDER)
        token = REQUEST_ID.set(call.id)
        try:
            self.hosts.check(headers.get("host", ""))
            if is_open:
                await self.app(scope, receive, sending)
            else:
                await self._counted(call, scope, receive, sending)
        except ApiError as error:
            self.metrics.refused.add(1, error.code or str(error.status))
            await error_response(error, path)(scope, receive, sending)
        finally:
            self._note(call, scope, sending.status, time.monotonic() - start, is_open=is_open)
            REQUEST_ID.reset(token)

    async def _counted(self, call: Call, scope: Scope, receive: Receive, send: "_Sending") -> None:
        """A request that is answered before the server ends. Raises ApiError for one that is turned away."""
        self.state.enter()
        try:
            self._admit(call, scope)
            # With the last byte, not after it: the client's next request may come before this one's task has ended.
            send.on_end = partial(self.limits.leave, call)
            await self.app(scope, receive, send)
        finally:
            self.limits.leave(call)
            self.state.leave()

    def _admit(self, call: Call, scope: Scope) -> None:
        """Raises ApiError for a request that is turned away."""
        call.tenant = self._tenant(scope["path"], Headers(scope=scope))
        if self.state.is_draining:
            raise draining()
        scope.setdefault("state", {})["tenant"] = call.tenant
        begin(call)
        if scope["method"] == "POST" and scope["path"] not in ADMIN_PATHS:
            self.limits.enter(call)

    def _tenant(self, path: str, headers: Headers) -> Tenant:
        """Who calls. Raises ApiError 401 or 403 for those who may not."""
        keys, is_admin = self.keys, path in ADMIN_PATHS
        if is_admin and not keys.has_admin:
            how = "start it with --admin-api-key, GLM5_ADMIN_API_KEY or a key of that role in --api-keys-file"
            raise ApiError(403, f"this server has no admin key, so nobody may do this: {how}", code="no_admin_key")
        if not is_admin and not keys.is_needed:
            return ANYONE
        tenant = keys.find(_key_of(headers))
        if tenant is None:
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if not self._may(tenant, path):
            needed = "admin" if is_admin else "metrics or admin" if path in _WATCHED else "user or admin"
            raise ApiError(403, f"this key may not do this; a key of the role {needed} may", code="forbidden")
        return tenant

    def _may(self, tenant: Tenant, path: str) -> bool:
        if path in ADMIN_PATHS:
            return tenant.role == "admin"
        if path in _WATCHED:
            return tenant.role != "user" or self.keys.num_users == 1
        return tenant.role != "metrics"

    def _note(self, call: Call, scope: Scope, status: int | None, seconds: float, *, is_open: bool) -> None:
        route: Any = scope.get("route")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        kind = "left" if status is None else f"{status // 100}xx"
        self.metrics.http.add(1, method, getattr(route, "path", "none"), kind)
        level = logging.DEBUG if is_open or scope["path"] in _WATCHED else logging.INFO
        # As it was sent, percent signs and all: a decoded path may hold line feeds.
        path, fields = scope["raw_path"].decode("ascii", "replace"), {"tenant": call.tenant.name, "seconds": seconds}
        caller = f" {call.tenant.name}" if call.tenant.name else ""
        logger.log(level, "%s %s %s%s %.3f s", method, path, status or "left", caller, seconds, extra=fields)


class _Sending:
    """Notes the status that goes out, and adds what every answer carries. `on_end` is called before its last part."""

    def __init__(self, send: Send, request_id: str, state: ServerState):
        self._send, self._request_id, self._state = send, request_id, state
        self.status: int | None = None
        self.on_end: Callable[[], None] | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._request_id
            if self._state.is_draining:
                headers["Connection"] = "close"
        elif self.on_end is not None and not message.get("more_body", False):
            self.on_end()
        await self._send(message)


def _key_of(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
