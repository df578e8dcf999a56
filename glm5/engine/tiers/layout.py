"""The format of a page's bytes, and a fingerprint of everything that must be equal for pages to be exchanged.

A page is copied as one block: its parts (latent rows and index keys of every layer) one after another. They are
copied, checked and dropped together, so no part can be newer than another.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

FINGERPRINT_BYTES = 16


@dataclass(frozen=True)
class PageLayout:
    """`parts`: name and bytes of each, in their order in a block. `page_size` in tokens."""

    page_size: int
    parts: tuple[tuple[str, int], ...]
    fingerprint: bytes

    @classmethod
    def of(cls, page_size: int, parts: Mapping[str, int], info: Mapping[str, object]) -> "PageLayout":
        """A layout whose fingerprint covers its parts and `info` (JSON values).

        `info` is all that decides whether another process may use a page: architecture, dtypes, weights, and
        what changes keys in the last bit (device, kernels, deterministic mode).
        """
        everything = json.dumps([page_size, list(parts.items()), dict(info)], sort_keys=True)
        digest = blake2b(everything.encode(), digest_size=FINGERPRINT_BYTES, person=b"glm5 page layout")
        return cls(page_size, tuple(parts.items()), digest.digest())

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return sum(size for _, size in self.parts)
