"""Responses that are kept for their callers: in memory, as many as there is room for, the oldest forgotten first.

A response keeps the conversation before it, whatever becomes of the responses that it goes on from.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Item = Mapping[str, Any]

MAX_RESPONSES = 1000  # of one caller
MAX_BYTES = 64 * 2**20  # of one caller's, each with all that came before it


@dataclass(frozen=True)
class Stored:
    """A response as it was answered, the items that it was asked with, and the one that it goes on from. `size`: bytes
    of all that, and of all before it."""

    response: dict[str, Any]
    input: list[Item]
    previous: "Stored | None"
    size: int

    @property
    def id(self) -> str:
        return self.response["id"]

    @property
    def items(self) -> list[Item]:
        """The whole conversation, to the end of the response."""
        turns: list[list[Item]] = []
        one: Stored | None = self
        while one is not None:
            turns.append([*one.input, *one.response["output"]])
            one = one.previous
        return [item for turn in reversed(turns) for item in turn]


class ResponseStore:
    """Of all callers, each of whom knows only the own. For the event loop's thread."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: dict[str, OrderedDict[str, Stored]] = {}

    def keep(self, tenant: str, stored: Stored) -> None:
        """Keep a response, in place of what has its id. One that is larger than there is room for is not kept."""
        kept = self._kept.setdefault(tenant, OrderedDict())
        kept[stored.id] = stored
        kept.move_to_end(stored.id)
        size = sum(one.size for one in kept.values())
        while size > self._max_bytes or len(kept) > self._max_responses:
            size -= kept.popitem(last=False)[1].size

    def find(self, tenant: str, response_id: str) -> Stored | None:
        """A response of the caller's, which is remembered longer for it."""
        kept = self._kept.get(tenant, OrderedDict())
        if response_id not in kept:
            return None
        kept.move_to_end(response_id)
        return kept[response_id]

    def items(self, tenant: str) -> dict[str, Item]:
        """Items of all the caller's responses, by their ids."""
        kept = self._kept.get(tenant, {}).values()
        return {item["id"]: item for stored in kept for item in (*stored.input, *stored.response["output"])}

    def drop(self, tenant: str, response_id: str) -> bool:
        """Forget a response. Whether there was one."""
        return self._kept.get(tenant, {}).pop(response_id, None) is not None
