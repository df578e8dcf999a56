"""Rate and concurrency limits per tenant, and a limit on the queue of the server. Beyond them a request gets 429.

    per tenant   requests per minute (a token bucket that holds one minute's requests), concurrent requests
    server       the answers that are computed at the same time, and `max_queue` more that wait

A refusal has a Retry-After header. A request frees its places when its HTTP response has ended.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from glm5.config.serve import ServeConfig
from glm5.serve.http.call import Call
from glm5.serve.http.errors import ApiError

FULL_SECONDS = 2  # Retry-After of a full server: a short answer ends in this time
BUSY_SECONDS = 1


@dataclass
class _Account:
    """The state of a tenant. `tokens`: requests left in its bucket at the time `seen`."""

    tokens: float
    seen: float
    num_active: int = 0


class Limits:
    """Counts requests per tenant. `requests_per_minute` and `max_concurrency` apply to tenants without their own."""

    def __init__(
        self,
        max_places: int | None = None,
        *,
        requests_per_minute: float | None = None,
        max_concurrency: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_places, self.num_places = max_places, 0
        self._rate, self._concurrency, self._clock = requests_per_minute, max_concurrency, clock
        self._accounts: dict[str, _Account] = {}

    @classmethod
    def of(cls, config: ServeConfig) -> Self:
        """The limits of a server with these settings."""
        return cls(
            config.max_num_seqs + config.max_queue,
            requests_per_minute=config.key_requests_per_minute,
            max_concurrency=config.key_max_concurrency,
        )

    def enter(self, call: Call) -> None:
        """Reserve a place for a request before its body is read. Raises ApiError 429 if a limit is reached."""
        tenant = call.tenant
        rate, concurrency = tenant.requests_per_minute or self._rate, tenant.max_concurrency or self._concurrency
        now = self._clock()
        account = self._accounts.setdefault(tenant.name, _Account(_burst(rate), now))
        self._check_room(1)
        if concurrency is not None and account.num_active >= concurrency:
            message = f"this key has {account.num_active} running requests; allowed: {concurrency} at the same time"
            raise ApiError(429, message, code="concurrency_limit_exceeded", retry_after=BUSY_SECONDS)
        if rate is not None:
            _spend(account, rate, now)
        account.num_active += 1
        call.places = 1
        self.num_places += 1

    def grow(self, call: Call, num_answers: int) -> None:
        """Reserve places for more answers of an admitted request. Raises ApiError: 429 if the queue is full."""
        wanted = call.num_answers + num_answers
        if self.max_places is not None and wanted > self.max_places:
            raise ApiError(400, f"the request asks for {wanted} answers; allowed: {self.max_places}", param="n")
        more = max(0, wanted - call.places)
        self._check_room(more)
        call.num_answers += num_answers
        call.places += more
        self.num_places += more

    def leave(self, call: Call) -> None:
        """Free the places of a request. A second call has no effect."""
        if call.places:
            self._accounts[call.tenant.name].num_active -= 1
            self.num_places -= call.places
            call.places = 0

    def _check_room(self, places: int) -> None:
        if self.max_places is not None and places and self.num_places + places > self.max_places:
            message = f"the server has {self.num_places} answers running or waiting; allowed: {self.max_places}"
            raise ApiError(429, f"{message}; try again later", code="queue_full", retry_after=FULL_SECONDS)


class Admission(Protocol):
    """`Limits` of the whole server, which another process may keep (`glm5.serve.coordination.remote`)."""

    async def enter(self, call: Call) -> None: ...
    async def grow(self, call: Call, num_answers: int) -> None: ...
    def leave(self, call: Call) -> None: ...


class OwnLimits:
    """`Admission` by limits in this process."""

    def __init__(self, limits: Limits):
        self.limits = limits

    async def enter(self, call: Call) -> None:
        self.limits.enter(call)

    async def grow(self, call: Call, num_answers: int) -> None:
        self.limits.grow(call, num_answers)

    def leave(self, call: Call) -> None:
        self.limits.leave(call)


def _burst(rate: float | None) -> float:
    """The size of a token bucket: the requests of one minute."""
    return max(1.0, rate or 0.0)


def _spend(account: _Account, rate: float, now: float) -> None:
    """Take a token for one request; the bucket is refilled with `rate` tokens a minute. Raises ApiError 429."""
    account.tokens = min(_burst(rate), account.tokens + (now - account.seen) * rate / 60)
    account.seen = now
    if account.tokens < 1 - 1e-9:  # tolerates rounding errors after exactly the Retry-After time
        seconds = math.ceil((1 - account.tokens) * 60 / rate)
        message = f"this key has used its {rate:g} requests a minute; try again in {seconds} s"
        raise ApiError(429, message, code="rate_limit_exceeded", retry_after=seconds)
    account.tokens -= 1
