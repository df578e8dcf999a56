"""Under which names a server may be asked: what a request's Host header may say.

A page from elsewhere can let its own name point to this machine (DNS rebinding): its requests are then, for a browser,
requests to where the page came from, and it may read the answers. It cannot send another Host than its own name, nor
have a key. So a server without keys answers to the names of the loopback address, to the one it listens on and to those
that it is told; and to addresses, which nobody can let point elsewhere. With keys, all names are good unless some are
told.
"""

import ipaddress
import re
from collections.abc import Sequence

from glm5.serve.http.errors import ApiError


class Hosts:
    """`names`: allowed ones, "*.example" for all below example, "*" for all; None for all."""

    def __init__(self, names: Sequence[str] | None):
        self._names = None if names is None or "*" in names else {"localhost", "*.localhost", *map(_plain, names)}

    def check(self, host: str) -> None:
        """Raises ApiError 421. No name at all, as HTTP/1.0 allows, is none of another's."""
        name = _name_of(host)
        if self._names is None or host == "" or name in self._names or _is_address(name):
            return
        parts = name.split(".")
        if any(f"*.{'.'.join(parts[at:])}" in self._names for at in range(1, len(parts))):
            return
        allowed = "localhost, an address in numbers, or what the server was started with as --allowed-hosts"
        raise ApiError(421, f"the Host header is {host!r:.80}; allowed: {allowed}", code="unknown_host")


_HOST = re.compile(r"(?:\[([^]]*)\]|([^:\[\]]*))(?::\d*)?")


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _name_of(host: str) -> str:
    """Without the port; none where anything else stands behind it."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1] or _plain(found[2] or "")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
