"""What changes in the prefix tree and in the lower tiers, recorded for subscribers. Nothing is recorded without one.

A page is named by the digest of its key (tiers/key.py), a chained hash over salt, prefix and tokens. It may be in
several places at once: on the device, and in one lower tier.

    stored     a page can be found in a place from now on
    removed    it can no longer be found there
    cleared    no page can be found anywhere

After new weights, the pages of the old ones stay in the lower tiers, but no request finds them: `cleared` covers them
too. If the old weights return, such a page is recorded again when it is next used.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from glm5.engine.tiers.copies import Tier

Place = Literal["device", "host", "disk"]


class Stored(NamedTuple):
    """`parent`: digest of the page before, None for the first page of a prompt."""

    place: Place
    digest: bytes
    parent: bytes | None
    tokens: Sequence[int]


class Removed(NamedTuple):
    place: Place
    digest: bytes


class Cleared(NamedTuple):
    pass


Change = Stored | Removed | Cleared


class CacheChanges:
    """Changes since the last `take`, in order. Only the engine's thread may use it."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._lower: dict[bytes, Stored] = {}

    def take(self) -> list[Change]:
        """The changes, which are forgotten here."""
        changes, self._changes = self._changes, []
        return changes

    def stored(self, digest: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        """A page has entered the prefix tree."""
        self._changes.append(Stored("device", digest, parent, tokens))

    def removed(self, digest: bytes) -> None:
        """A page has left the prefix tree."""
        self._changes.append(Removed("device", digest))

    def cleared(self) -> None:
        """The prefix tree is empty, and no page of a lower tier is valid."""
        self._changes = [Cleared()]
        self._lower.clear()

    def in_tier(self, tier: Tier, digest: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        """A lower tier has the page."""
        if digest in self._lower:
            self.moved(digest, tier)
            return
        self._lower[digest] = stored = Stored(tier, digest, parent, tokens)
        self._changes.append(stored)

    def moved(self, digest: bytes, tier: Tier | None) -> None:
        """A page of a lower tier is in this one now, or in none. Pages that subscribers do not know are ignored."""
        known = self._lower.get(digest)
        if known is None or known.place == tier:
            return
        self._changes.append(Removed(known.place, digest))
        if tier is None:
            del self._lower[digest]
        else:
            self._lower[digest] = moved = known._replace(place=tier)
            self._changes.append(moved)
