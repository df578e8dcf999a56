"""Requests under way, for those who asked for them: they may end one by its name, or all that are theirs.

What one caller asks for, no other caller can name.
"""

from collections import Counter


class Running:
    """Names by caller, of the event loop's thread. A name may be under way several times."""

    def __init__(self) -> None:
        self._names: dict[str, Counter[str]] = {}

    def enter(self, tenant: str, name: str) -> str:
        """A request begins. The id that the engine is to know it by: no name of another caller's gives the same."""
        self._names.setdefault(tenant, Counter())[name] += 1
        return _engine_id(tenant, name)

    def leave(self, tenant: str, name: str) -> None:
        """The request has ended."""
        names = self._names[tenant]
        names[name] -= 1
        if not names[name]:
            del names[name]
        if not names:
            del self._names[tenant]

    def find(self, tenant: str, name: str | None = None) -> list[str]:
        """Ids for the engine: of the caller's requests of this name, and of a batch's parts, "name_0" and so on; of all
        the caller's without a name."""
        names = self._names.get(tenant, ())
        return [_engine_id(tenant, own) for own in names if name is None or own == name or _is_part(own, name)]


def _is_part(own: str, name: str) -> bool:
    return own.startswith(f"{name}_") and own.removeprefix(f"{name}_").isdecimal()


def _engine_id(tenant: str, name: str) -> str:
    # Names of callers have no slash, and who has none is the only caller there is.
    return f"{tenant}/{name}" if tenant else name
