"""Pages of keys behind the device: in host memory, and in files that outlive the process.

key      the name of a page: a chain of hashes over its prefix        layout    what its bytes mean; the fingerprint
pageio   page on the device to block in host memory, and back         copies    `CopyQueue`: threads that move pages
host     blocks in memory, least recently used first out              disk      page files under a directory
pagefile one page in one file: checked, atomic                        folder    which files there are, their ages

A page moves as a whole: latent rows and index keys of all layers are one block with one checksum. Nothing here knows
the scheduler: it names pages by key and device page id, and learns of finished copies from `CopyQueue.done`.
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
