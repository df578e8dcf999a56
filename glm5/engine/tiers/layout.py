"""What the bytes of a page mean, and the fingerprint that tells equal meanings from others.

A page travels as one block: its parts (latent rows and index keys of every layer) one after the other. They are
copied, checked and dropped together, so that no part can be newer than another.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

FINGERPRINT_BYTES = 16


@dataclass(frozen=True)
class PageLayout:
    """`parts`: name and bytes of each, in the order in which they lie in a block. `page_size` in tokens."""

    page_size: int
    parts: tuple[tuple[str, int], ...]
    fingerprint: bytes

    @classmethod
    def of(cls, page_size: int, parts: Mapping[str, int], facts: Mapping[str, object]) -> "PageLayout":
        """A layout whose fingerprint covers its parts and `facts` (JSON values).

        Facts are all that decides whether another process may use a page as its own: architecture, dtypes, which
        weights, and what makes their keys differ in the last bit (device, kernels, deterministic mode).
        """
        everything = json.dumps([page_size, list(parts.items()), dict(facts)], sort_keys=True)
        digest = blake2b(everything.encode(), digest_size=FINGERPRINT_BYTES, person=b"glm5 page layout")
        return cls(page_size, tuple(parts.items()), digest.digest())

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return sum(size for _, size in self.parts)
