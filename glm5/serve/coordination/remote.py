"""Limits and stores that the main process keeps for all front ends, as the routes of one front end see them."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection
from itertools import count
from typing import Any

from glm5.common.watching import BEAT_SECONDS, Silence
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
)
from glm5.serve.coordination.peer import Peer
from glm5.serve.http.call import Call
from glm5.serve.http.errors import ApiError, main_process_silent
from glm5.serve.metrics.prometheus import Totals
from glm5.serve.service.response_store import MAX_BYTES, Item, Stored
from glm5.serve.service.shared import ServerFigures, Stats
from glm5.serve.service.state import ServerState

logger = logging.getLogger(__name__)

SILENT_SECONDS = 10.0  # without an answer to a heartbeat: the main process answers at once unless it hangs


class Remote:
    """`Admission` and `Shared` by messages to the main process."""

    def __init__(self, main: Peer):
        self._main, self._numbers = main, count(1)

    async def enter(self, call: Call) -> None:
        # The number is set first: whoever stops waiting leaves with it, and the main process reads in order.
        call.number = next(self._numbers)
        await self._main.call(Enter(call.number, call.tenant))
        call.places = 1

    async def grow(self, call: Call, num_answers: int) -> None:
        wanted = call.num_answers + num_answers
        if wanted > call.places:
            call.places = await self._main.call(Grow(call.number, call.num_answers, num_answers), int)
        call.num_answers = wanted

    def leave(self, call: Call) -> None:
        if call.number:
            self._main.send(Exit(call.number))
            call.number = call.places = 0

    async def keep(self, tenant: str, stored: Stored) -> None:
        await self._keep(tenant, stored, is_new=True)

    async def replace(self, tenant: str, stored: Stored) -> None:
        await self._keep(tenant, stored, is_new=False)

    async def find(self, tenant: str, response_id: str) -> Stored | None:
        content = await self._main.call(Find(tenant, response_id), bytes | None)
        return None if content is None else _unpacked(content)

    async def items(self, tenant: str, ids: Collection[str]) -> dict[str, Item]:
        contents = await self._main.call(FindItems(tenant, list(ids)), list[bytes])
        return {item["id"]: item for each in contents for item in _unpacked(each).own_items if item["id"] in ids}

    async def drop(self, tenant: str, response_id: str) -> bool:
        return await self._main.call(Drop(tenant, response_id), bool)

    def discard(self, tenant: str, response_id: str) -> None:
        self._main.send(Drop(tenant, response_id))

    async def abort_elsewhere(self, tenant: str, name: str | None) -> int:
        return await self._main.call(Abort(tenant, name), int)

    async def name_weights_elsewhere(self, version: int, name: str | None) -> None:
        await self._main.call(NameWeights(version, name))

    async def figures(self, totals: Totals, num_active: int, stats: Stats | None) -> ServerFigures:
        self._main.send(Heartbeat(totals, num_active))
        whole = await self._main.call(Collect(stats), Figures)
        return ServerFigures(whole.totals, whole.num_active, whole.stats)

    async def _keep(self, tenant: str, stored: Stored, *, is_new: bool) -> None:
        # What the store would not keep is not sent.
        content = json.dumps(_packed(stored)).encode() if stored.size <= MAX_BYTES else b""
        ids, size = stored.item_ids, stored.size
        await self._main.call(Keep(tenant, stored.id, ids, content, size, is_new=is_new, is_running=stored.is_running))


def _packed(stored: Stored) -> dict[str, Any]:
    return {name: getattr(stored, name) for name in Stored.__dataclass_fields__}


def _unpacked(content: bytes) -> Stored:
    return Stored(**json.loads(content))


async def beat(main: Peer, state: ServerState, heartbeat: Callable[[], Heartbeat]) -> None:
    """Send heartbeats for ever. While the main process does not answer them, the state says so, and what waits for an
    answer fails."""
    while True:
        is_answered = await _in_time(asyncio.ensure_future(_is_answered(main, heartbeat())))
        if is_answered is state.is_main_silent:
            logger.warning("the main process %s", "answers again" if is_answered else "does not answer")
        state.is_main_silent = not is_answered
        if not is_answered:
            main.give_up(main_process_silent())
        await asyncio.sleep(BEAT_SECONDS)


async def _is_answered(main: Peer, heartbeat: Heartbeat) -> bool:
    try:
        await main.call(heartbeat)
    except (ApiError, ConnectionError):
        return False
    return True


async def _in_time(answered: asyncio.Future[bool]) -> bool:
    silence = Silence(SILENT_SECONDS, SILENT_SECONDS)
    while not silence.is_too_long:
        began = time.monotonic()
        await asyncio.wait([answered], timeout=BEAT_SECONDS)
        if answered.done():
            return answered.result()
        silence.wait(began, BEAT_SECONDS)
    return False
