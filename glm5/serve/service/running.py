"""The running requests of each tenant, which may abort one by its id, or all of its own.

A tenant cannot address another tenant's requests.
"""

from collections import Counter


class RunningRequests:
    """Request ids by tenant; several running requests may share one. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._names: dict[str, Counter[str]] = {}

    def enter(self, tenant: str, name: str) -> str:
        """Add a request. Returns its id for the engine, which is unique among tenants."""
        self._names.setdefault(tenant, Counter())[name] += 1
        return _engine_id(tenant, name)

    def leave(self, tenant: str, name: str) -> None:
        """Remove a request that has ended."""
        names = self._names[tenant]
        names[name] -= 1
        if not names[name]:
            del names[name]
        if not names:
            del self._names[tenant]

    @property
    def count(self) -> int:
        """How many requests run, of all tenants."""
        return sum(names.total() for names in self._names.values())

    def find(self, tenant: str, name: str | None = None) -> list[str]:
        """The engine's ids of the tenant's requests with this name, and of a batch's parts "name_0", "name_1"; without
        a name, of all its requests."""
        names = self._names.get(tenant, ())
        return [_engine_id(tenant, own) for own in names if name is None or own == name or _is_part(own, name)]


def _is_part(own: str, name: str) -> bool:
    return own.startswith(f"{name}_") and own.removeprefix(f"{name}_").isdecimal()


def _engine_id(tenant: str, name: str) -> str:
    # A tenant's name has no slash. An empty name means that the server has no keys, and so no other tenant.
    return f"{tenant}/{name}" if tenant else name
