"""Stores responses of /v1/responses in memory, per tenant; the least recently used are dropped first.

A stored response holds the conversation before it, even after the responses it continues have been deleted.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

Item = Mapping[str, Any]

MAX_RESPONSES = 1000  # per tenant
MAX_BYTES = 64 * 2**20  # per tenant; each response counts with its earlier conversation


@dataclass(frozen=True)
class Stored:
    """A response, the input items of its request, and the items of the conversation before. `size`: bytes of all
    these."""

    response: dict[str, Any]
    input: list[Item]
    earlier: list[Item]
    size: int

    @property
    def id(self) -> str:
        return self.response["id"]

    @property
    def is_running(self) -> bool:
        return self.response["status"] == "in_progress"

    @property
    def own_items(self) -> list[Item]:
        """The items of the request and of its response."""
        return [*self.input, *self.response["output"]]

    @property
    def item_ids(self) -> list[str]:
        """The ids of its own items."""
        return [item["id"] for item in self.own_items]

    @property
    def items(self) -> list[Item]:
        """The items of the conversation up to the end of this response."""
        return [*self.earlier, *self.own_items]


class Entry(Protocol):
    """What a store needs of a response."""

    @property
    def id(self) -> str: ...
    @property
    def item_ids(self) -> Collection[str]: ...
    @property
    def size(self) -> int: ...


E = TypeVar("E", bound=Entry)


class ResponseStore(Generic[E]):
    """The stored responses of all tenants; each sees only its own. Used on the event loop's thread only."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: dict[str, OrderedDict[str, E]] = {}

    def keep(self, tenant: str, stored: E) -> None:
        """Store a response, replacing one of the same id. A response larger than the limit is not stored."""
        kept = self._kept.setdefault(tenant, OrderedDict())
        kept[stored.id] = stored
        kept.move_to_end(stored.id)
        size = sum(one.size for one in kept.values())
        while size > self._max_bytes or len(kept) > self._max_responses:
            size -= kept.popitem(last=False)[1].size

    def replace(self, tenant: str, stored: E) -> None:
        """As `keep`, but only if the response is still stored."""
        if self.find(tenant, stored.id) is not None:
            self.keep(tenant, stored)

    def find(self, tenant: str, response_id: str) -> E | None:
        """A stored response of the tenant, which becomes its most recently used one; None if unknown."""
        kept = self._kept.get(tenant, {})
        if response_id not in kept:
            return None
        self._kept[tenant].move_to_end(response_id)
        return kept[response_id]

    def holders(self, tenant: str, item_ids: Collection[str]) -> list[E]:
        """The tenant's responses that hold these items, the most recently used one last."""
        kept = self._kept.get(tenant, {})
        found = {name: stored.id for stored in kept.values() for name in stored.item_ids if name in item_ids}
        return [stored for stored in kept.values() if stored.id in found.values()]

    def drop(self, tenant: str, response_id: str) -> bool:
        """Delete a response. False if it is not stored."""
        return self._kept.get(tenant, {}).pop(response_id, None) is not None
