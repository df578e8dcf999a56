"""The lower tiers of the KV cache: pages in host memory, and in files that outlive the process.

key      a page's key: a chain of hashes over its prefix              layout    format of its bytes; the fingerprint
pageio   page on the device to block in host memory, and back         copies    `CopyQueue`: threads that copy pages
host     blocks in memory, evicted least recently used first          disk      page files under a directory
pagefile one page in one file: checked, atomic                        folder    the existing files and their last use

A page is copied as one block with one checksum: latent rows and index keys of all layers. Nothing here depends on the
scheduler, which identifies pages by key and device page id, and gets finished copies from `CopyQueue.done`.
"""

from glm5.engine.tiers.copies import Copied, CopyQueue, Tier
from glm5.engine.tiers.disk import DiskTier
from glm5.engine.tiers.host import HostTier
from glm5.engine.tiers.key import PageKey, page_key
from glm5.engine.tiers.layout import PageLayout
from glm5.engine.tiers.pageio import PageIO, layout_of, page_io

__all__ = [
    "Copied",
    "CopyQueue",
    "DiskTier",
    "HostTier",
    "PageIO",
    "PageKey",
    "PageLayout",
    "Tier",
    "layout_of",
    "page_io",
    "page_key",
]
