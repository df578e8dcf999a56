"""How much a caller may ask, and how much all callers together: what is beyond it is refused at once, with 429.

    a caller     requests a minute (a bucket that holds a minute's worth), requests at the same time
    all          as many answers as are computed at the same time, and `max_queue` more that wait

A refusal says after how many seconds to try again. What is taken is given back when the HTTP request has ended.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from glm5.serve.http.call import Call
from glm5.serve.http.errors import ApiError

FULL_SECONDS = 2  # after which a full server may have room: an answer of a few dozen tokens has ended
BUSY_SECONDS = 1


@dataclass
class _Account:
    """What a caller has taken: `tokens` are requests that are still allowed, as of `seen`."""

    tokens: float
    seen: float
    num_active: int = 0


class Limits:
    """Counts for every caller. `requests_per_minute` and `max_concurrency` hold for callers that have no own."""

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

    def enter(self, call: Call) -> None:
        """Take a place for a request, before its body is read. Raises ApiError 429 and takes nothing."""
        tenant = call.tenant
        rate, concurrency = tenant.requests_per_minute or self._rate, tenant.max_concurrency or self._concurrency
        now = self._clock()
        account = self._accounts.setdefault(tenant.name, _Account(_burst(rate), now))
        self._check_room(1)
        if concurrency is not None and account.num_active >= concurrency:
            message = f"this key has {account.num_active} requests under way; allowed: {concurrency} at the same time"
            raise ApiError(429, message, code="concurrency_limit_exceeded", retry_after=BUSY_SECONDS)
        if rate is not None:
            _spend(account, rate, now)
        account.num_active += 1
        call.places = 1
        self.num_places += 1

    def grow(self, call: Call, num_answers: int) -> None:
        """The request, which has a place, turns out to want so many answers more. Raises ApiError 429."""
        wanted = call.num_answers + num_answers
        if self.max_places is not None and wanted > self.max_places:
            raise ApiError(400, f"the request asks for {wanted} answers; allowed: {self.max_places}", param="n")
        more = max(0, wanted - call.places)
        self._check_room(more)
        call.num_answers += num_answers
        call.places += more
        self.num_places += more

    def leave(self, call: Call) -> None:
        """Give back what the request took; nothing, where that has happened."""
        if call.places:
            self._accounts[call.tenant.name].num_active -= 1
            self.num_places -= call.places
            call.places = 0

    def _check_room(self, places: int) -> None:
        if self.max_places is not None and places and self.num_places + places > self.max_places:
            message = f"the server has {self.num_places} answers under way or waiting; allowed: {self.max_places}"
            raise ApiError(429, f"{message}; try again later", code="queue_full", retry_after=FULL_SECONDS)


def _burst(rate: float | None) -> float:
    """Requests that may come at once: those of a minute."""
    return max(1.0, rate or 0.0)


def _spend(account: _Account, rate: float, now: float) -> None:
    """One request of a caller that may make `rate` a minute."""
    account.tokens = min(_burst(rate), account.tokens + (now - account.seen) * rate / 60)
    account.seen = now
    if account.tokens < 1 - 1e-9:  # after exactly the time that was told, whatever was rounded
        seconds = math.ceil((1 - account.tokens) * 60 / rate)
        message = f"this key makes more than {rate:g} requests a minute; try again in {seconds} s"
        raise ApiError(429, message, code="rate_limit_exceeded", retry_after=seconds)
    account.tokens -= 1
