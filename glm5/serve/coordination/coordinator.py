"""The state that all front ends of a server share, kept by the main process: limits, stored responses, totals.

Everything that a front end holds is given back when its connection ends: places in limits, responses in progress, and
its requests in the engine. What its last heartbeat has counted stays in the totals; /metrics shows only these, so that
counters never go back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, field
from typing import Any

from glm5.common.watching import Silence
from glm5.serve.coordination.messages import (
    Abort,
    Collect,
    Drop,
    Enter,
    Exit,
    Figures,
    Find,
    FindItems,
    Grow,
    Heartbeat,
    Keep,
    NameWeights,
    Report,
    ToFrontEnd,
    ToMain,
)
from glm5.serve.coordination.peer import Peer
from glm5.serve.http.call import Call
from glm5.serve.http.errors import ApiError
from glm5.serve.http.limits import Limits
from glm5.serve.metrics.prometheus import Totals, merge
from glm5.serve.service.response_store import ResponseStore
from glm5.serve.service.weight_names import WeightNames

logger = logging.getLogger(__name__)

ASK_SECONDS = 1.0  # for a front end to answer; after them its last figures count


@dataclass(frozen=True)
class Packed:
    """A stored response, as its front end packed it."""

    id: str
    item_ids: Collection[str]
    content: bytes
    size: int


@dataclass(eq=False)
class Member:
    """A front end that is connected. `client`: its number among the engine's clients. `silence`: since its last
    heartbeat. `calls`: its requests that hold places. `running`: (tenant, id) of its stored responses in progress.
    `heartbeat`: the last."""

    client: int
    silence: Silence
    peer: Peer | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    running: set[tuple[str, str]] = field(default_factory=set)
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat({}, 0))

    async def ask(self, message: ToFrontEnd, answer: Any, seconds: float = ASK_SECONDS) -> Any:
        """Its answer; None if it has ended or does not answer in time."""
        if self.peer is None:
            return None
        try:
            async with asyncio.timeout(seconds):
                return await self.peer.call(message, answer)
        except ConnectionError:  # it has just ended
            return None
        except (TimeoutError, ApiError) as error:
            logger.warning("front end %d: %s", self.client, str(error) or f"no answer within {seconds:g} s")
            return None


class Coordinator:
    """Belongs to one event loop."""

    def __init__(self, limits: Limits):
        self.limits, self.store = limits, ResponseStore[Packed]()
        self.weight_names = WeightNames()
        self.members: set[Member] = set()
        self._ended: Totals = {}  # of front ends that are no more
        self._stats: dict[str, Any] | None = None  # the engine's last

    def leave(self, member: Member) -> None:
        """Take back all that a front end held. Call it once its connection has ended."""
        self.members.discard(member)
        for call in member.calls.values():
            self.limits.leave(call)
        for tenant, response_id in member.running:
            self.store.drop(tenant, response_id)
        merge(self._ended, member.heartbeat.totals)

    async def ask_all(self, message: ToFrontEnd, answer: Any, besides: Member | None = None) -> list[Any]:
        """The answers of all front ends `besides` one; those that do not answer are left out."""
        asked: list[Awaitable[Any]] = [each.ask(message, answer) for each in self.members if each is not besides]
        return [given for given in await asyncio.gather(*asked) if given is not None]

    def handle(self, member: Member, message: ToMain) -> Any:
        """The answer to a message of a front end, or a coroutine for it. Raises ApiError for a refusal."""
        match message:
            case Heartbeat():
                member.silence.end()
                member.heartbeat = message
            case Enter(number, tenant):
                call = Call("", tenant)
                self.limits.enter(call)
                member.calls[number] = call
            case Grow(number, num_before, num_answers):
                call = member.calls[number]
                call.num_answers = num_before
                self.limits.grow(call, num_answers)
                return call.places
            case Exit(number):
                if (call := member.calls.pop(number, None)) is not None:  # else it was refused
                    self.limits.leave(call)
            case Keep():
                self._keep(member, message)
            case Find(tenant, response_id):
                found = self.store.find(tenant, response_id)
                return None if found is None else found.content
            case FindItems(tenant, ids):
                return [found.content for found in self.store.holders(tenant, ids)]
            case Drop(tenant, response_id):
                member.running.discard((tenant, response_id))
                return self.store.drop(tenant, response_id)
            case Abort():
                return self._abort(member, message)
            case NameWeights(version, name):
                return self._name_weights(member, version, name)
            case Collect(stats):
                return self._collect(member, stats)
        return None

    def _keep(self, member: Member, message: Keep) -> None:
        key = (message.tenant, message.id)
        (member.running.add if message.is_running else member.running.discard)(key)
        packed = Packed(message.id, message.item_ids, message.content, message.size)
        (self.store.keep if message.is_new else self.store.replace)(message.tenant, packed)

    async def _abort(self, member: Member, message: Abort) -> int:
        return sum(await self.ask_all(message, int, besides=member))

    async def _name_weights(self, member: Member, version: int, name: str | None) -> None:
        self.weight_names.set(version, name)
        await self.ask_all(NameWeights(version, name), None, besides=member)

    async def _collect(self, member: Member, stats: dict[str, Any] | None) -> Figures:
        self._stats = stats or self._stats
        num_active = await self.refresh(besides=member)  # it has just sent its own
        totals: Totals = {}
        for more in (self._ended, *[each.heartbeat.totals for each in self.members]):
            merge(totals, more)
        return Figures(totals, num_active, self._stats)

    async def refresh(self, besides: Member | None = None) -> int:
        """Ask the front ends for heartbeats. Returns how many requests run in all of them."""
        await self.ask_all(Report(), None, besides)
        return sum(each.heartbeat.num_active for each in self.members)
