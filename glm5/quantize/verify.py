"""What was written, read again: every file's header, every tensor, every code and scale against what was meant."""

import logging

from glm5.common.errors import CheckpointError
from glm5.common.progress import Progress
from glm5.quantize.job import Job
from glm5.quantize.measure import Written
from glm5.quantize.source import OUTER, STACK, name_of
from glm5.quantize.store import Store, digest, digest_of

logger = logging.getLogger(__name__)


def verify(job: Job, store: Store) -> int:
    """Read everything back; returns how many modules and tensors were compared. CheckpointError names the first that
    is not what it was to be; what is not as meant is marked as not done, so that the same command writes it anew."""
    written = Written(store.model)
    num_compared = 0
    with Progress(len(store.layers), "layer", "verifying") as progress:
        for layer_idx, entry in sorted(store.layers.items()):
            for name, meant in entry["plain"].items():
                _compare(digest({name: written.fetch(name)}), meant, name, store, layer_idx)
            for module, linear in job.run.plan.layer(layer_idx).items() if layer_idx != OUTER else ():
                experts = range(job.cfg.n_routed_experts) if module.startswith(STACK) else (None,)
                for expert in experts:
                    name = name_of(layer_idx, module, expert)
                    if name in entry["digests"]:
                        read = job.run.form.read(name, linear.scheme, written.fetch)
                        _compare(digest_of(read), entry["digests"][name], name, store, layer_idx)
            num_compared += len(entry["plain"]) + len(entry["digests"])
            progress.update(1)
    logger.info("verified: %d modules and tensors read back as they were meant", num_compared)
    return num_compared


def _compare(got: str, meant: str, name: str, store: Store, layer_idx: int) -> None:
    if got != meant:
        raise CheckpointError(
            f"{store.model}: {name} of layer {layer_idx} reads back unlike it was written: the disk or its driver "
            "loses bytes; --restart begins anew"
        )
