"""What the front-end processes of a server share (--api-server-count), as the routes see it.

`OneProcess` is for a server without further processes; `glm5.serve.coordination.remote` asks the main process.
"""

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

from glm5.serve.metrics.prometheus import Totals
from glm5.serve.service.response_store import Item, ResponseStore, Stored

Stats = dict[str, Any]  # of the engine


class ServerFigures(NamedTuple):
    """Figures of all processes of a server: totals of metrics, with those of processes that have ended; running
    requests; the last statistics of the engine that any process got."""

    totals: Totals
    num_active: int
    stats: Stats | None


class Shared(Protocol):
    """Stored responses of tenants, and what concerns the requests of all processes."""

    async def keep(self, tenant: str, stored: Stored) -> None:
        """Store a response."""
        ...

    async def replace(self, tenant: str, stored: Stored) -> None:
        """Store it again after a change, unless it was deleted meanwhile."""
        ...

    async def find(self, tenant: str, response_id: str) -> Stored | None: ...

    async def items(self, tenant: str, ids: Collection[str]) -> dict[str, Item]:
        """Those of these items that stored responses hold, by id."""
        ...

    async def drop(self, tenant: str, response_id: str) -> bool:
        """Delete a response. False if it is not stored."""
        ...

    def discard(self, tenant: str, response_id: str) -> None:
        """Delete a response if it is stored, without waiting for it."""
        ...

    async def abort_elsewhere(self, tenant: str, name: str | None) -> int:
        """Abort a tenant's requests in the other processes (`RunningRequests.find`). Returns how many."""
        ...

    async def name_weights_elsewhere(self, version: int, name: str | None) -> None: ...

    async def figures(self, totals: Totals, num_active: int, stats: Stats | None) -> ServerFigures:
        """The figures of the whole server. It takes this process's own; `stats` None: the engine is slow."""
        ...


class OneProcess:
    """`Shared` where this is the only process."""

    def __init__(self) -> None:
        self.store: ResponseStore[Stored] = ResponseStore()

    async def keep(self, tenant: str, stored: Stored) -> None:
        self.store.keep(tenant, stored)

    async def replace(self, tenant: str, stored: Stored) -> None:
        self.store.replace(tenant, stored)

    async def find(self, tenant: str, response_id: str) -> Stored | None:
        return self.store.find(tenant, response_id)

    async def items(self, tenant: str, ids: Collection[str]) -> dict[str, Item]:
        found = self.store.holders(tenant, ids)
        return {item["id"]: item for stored in found for item in stored.own_items if item["id"] in ids}

    async def drop(self, tenant: str, response_id: str) -> bool:
        return self.store.drop(tenant, response_id)

    def discard(self, tenant: str, response_id: str) -> None:
        self.store.drop(tenant, response_id)

    async def abort_elsewhere(self, tenant: str, name: str | None) -> int:
        return 0

    async def name_weights_elsewhere(self, version: int, name: str | None) -> None:
        pass

    async def figures(self, totals: Totals, num_active: int, stats: Stats | None) -> ServerFigures:
        return ServerFigures(totals, num_active, stats)
