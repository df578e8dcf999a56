"""Stores responses of /v1/responses in memory, per tenant; the least recently used are dropped first.

A stored response holds the conversation before it, even after the responses it continues have been deleted.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Item = Mapping[str, Any]

MAX_RESPONSES = 1000  # per tenant
MAX_BYTES = 64 * 2**20  # per tenant; each response counts with its earlier conversation


@dataclass(frozen=True)
class Stored:
    """A response, the input items of its request, and the response that it continues. `size`: bytes of all these, the
    earlier conversation included."""

    response: dict[str, Any]
    input: list[Item]
    previous: "Stored | None"
    size: int

    @property
    def id(self) -> str:
        return self.response["id"]

    @property
    def items(self) -> list[Item]:
        """The items of the conversation up to the end of this response."""
        turns: list[list[Item]] = []
        one: Stored | None = self
        while one is not None:
            turns.append([*one.input, *one.response["output"]])
            one = one.previous
        return [item for turn in reversed(turns) for item in turn]


class ResponseStore:
    """The stored responses of all tenants; each sees only its own. Used on the event loop's thread only."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: dict[str, OrderedDict[str, Stored]] = {}

    def keep(self, tenant: str, stored: Stored) -> None:
        """Store a response, replacing one of the same id. A response larger than the limit is not stored."""
        kept = self._kept.setdefault(tenant, OrderedDict())
        kept[stored.id] = stored
        kept.move_to_end(stored.id)
        size = sum(one.size for one in kept.values())
        while size > self._max_bytes or len(kept) > self._max_responses:
            size -= kept.popitem(last=False)[1].size

    def find(self, tenant: str, response_id: str) -> Stored | None:
        """A stored response of the tenant, which becomes its most recently used one; None if unknown."""
        kept = self._kept.get(tenant, OrderedDict())
        if response_id not in kept:
            return None
        kept.move_to_end(response_id)
        return kept[response_id]

    def items(self, tenant: str) -> dict[str, Item]:
        """The items of all responses of the tenant, by id."""
        kept = self._kept.get(tenant, {}).values()
        return {item["id"]: item for stored in kept for item in (*stored.input, *stored.response["output"])}

    def drop(self, tenant: str, response_id: str) -> bool:
        """Delete a response. False if it is not stored."""
        return self._kept.get(tenant, {}).pop(response_id, None) is not None
