"""Checks the Host header of a request against the host names that are allowed.

This protects against DNS rebinding: a foreign web page can point its own host name to this machine, and the browser
then lets it read the responses. But the page cannot send another Host header than its own name, and has no API key. So
a server without keys accepts only loopback names, the name it listens on, names from --allowed-hosts, and IP addresses,
which cannot be rebound. A server with keys accepts all names unless --allowed-hosts is given.
"""

import ipaddress
import re
from collections.abc import Sequence

from glm5.serve.http.errors import ApiError


class Hosts:
    """`names`: allowed host names. "*.example" allows all subdomains of example; "*" or None allows all names."""

    def __init__(self, names: Sequence[str] | None):
        self._names = None if names is None or "*" in names else {"localhost", "*.localhost", *map(_plain, names)}

    def check(self, host: str) -> None:
        """Raises ApiError 421 for a name that is not allowed. A missing one, as in HTTP/1.0, is allowed."""
        name = _name_of(host)
        if self._names is None or host == "" or name in self._names or _is_address(name):
            return
        parts = name.split(".")
        if any(f"*.{'.'.join(parts[at:])}" in self._names for at in range(1, len(parts))):
            return
        allowed = "localhost, an IP address, or a name that the server was given with --allowed-hosts"
        raise ApiError(421, f"the Host header is {host!r:.80}; allowed: {allowed}", code="unknown_host")


_HOST = re.compile(r"(?:\[([^]]*)\]|([^:\[\]]*))(?::\d*)?")


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _name_of(host: str) -> str:
    """The host name without the port; empty for a malformed header."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1] or _plain(found[2] or "")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
