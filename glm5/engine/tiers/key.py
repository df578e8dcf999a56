"""The key of a full page in the lower tiers.

    digest = blake2b(salt, digest of the page before, token ids of this page)

Keys of a prompt form a chain: two pages have the same key only if all tokens before them and the salt are the same.
The key contains the token ids in addition to the digest, so that a collision of digests is detected.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 16


class PageKey(NamedTuple):
    """`digest` identifies salt, prefix and page; `tokens` are the page's own ids as little-endian int32."""

    digest: bytes
    tokens: bytes


def page_key(parent: PageKey | None, tokens: Sequence[int], salt: bytes) -> PageKey:
    """Key of the page that holds `tokens` after the page `parent` (None: the first of a sequence).

    `salt` separates caches that must not mix (tenant, weights). It is part of every key of a chain, so pages computed
    after a change of salt never share a key with those before, even under the same parent.
    """
    packed = struct.pack(f"<{len(tokens)}i", *tokens)
    digest = blake2b(struct.pack("<I", len(salt)), digest_size=DIGEST_BYTES, person=b"glm5 page key")
    digest.update(salt)
    digest.update(parent.digest if parent else bytes(DIGEST_BYTES))
    digest.update(packed)
    return PageKey(digest.digest(), packed)
