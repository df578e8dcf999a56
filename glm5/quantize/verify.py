"""What was written, read again: every file's header, every tensor, every code and scale against what was meant."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from glm5.common.errors import CheckpointError
from glm5.common.progress import Progress
from glm5.quantize.job import Job
from glm5.quantize.measure import Written
from glm5.quantize.store import Store, digest, digest_of

THREADS = 8

logger = logging.getLogger(__name__)


def verify(job: Job, store: Store) -> int:
    """Read everything back; returns how many modules and tensors were compared. CheckpointError names the first that
    is not what it was to be."""
    written = Written(store.model)
    num_compared = 0
    with Progress(len(store.layers), "layer", "verifying") as progress:
        for _, entry in sorted(store.layers.items()):

            def compare(name: str, entry: dict[str, Any] = entry) -> None:
                """One tensor that is not quantized, or one module, by their names on disk."""
                if name in entry["plain"]:
                    got, meant = digest({name: written.fetch(name)}), entry["plain"][name]
                else:
                    got, meant = digest_of(job.stored(name).read(written.fetch)), entry["digests"][name]
                if got != meant:
                    raise CheckpointError(
                        f"{store.model}: {name} reads back unlike it was written: the disk or its driver loses bytes; "
                        "--restart begins anew"
                    )

            with ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(compare, [*entry["plain"], *entry["digests"]]))
            num_compared += len(entry["plain"]) + len(entry["digests"])
            progress.update(1)
    logger.info("verified: %d modules and tensors read back as they were meant", num_compared)
    return num_compared
