"""The weights in use: their version and identity, and how they are replaced, released and restored.

New weights of a folder (or of the version whose marker is named) are read and checked in a thread, while requests
continue; replacing them is a copy between two launches. Those that are pushed are written bucket by bucket, while no
step runs.
`version` is the number that clients see. `identity` is unique among all weights, in any process, since stored pages
outlive this one; it is random for weights that are in no file.
"""

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from glm5.checkpoint.broadcaster import Receiver
from glm5.checkpoint.push import Push, SharedMemory
from glm5.checkpoint.shard import TensorEntry
from glm5.checkpoint.update import Staged, identity_of, read_all, replace, stage
from glm5.checkpoint.versions import MARKER, stage_version
from glm5.common.background import in_background
from glm5.common.errors import RequestError
from glm5.engine.cache.memory import restoring
from glm5.engine.runner.native import release as release_native
from glm5.engine.shared_model import SharedModel
from glm5.engine.transport.wire import PushCall
from glm5.kernels.current_device import current
from glm5.model.glm5 import Glm5
from glm5.parallel.table import UNSHARDED, Shard

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Weights:
    """The weights of `model`. `source`: the folder that they were loaded from, None for a model in memory. `shard`:
    this rank's. `derived_from`: what they depend on in addition to that folder's files. `shared`: the caller's model,
    if these are its weights; its memory is not released, and updates change it."""

    def __init__(
        self,
        model: Glm5,
        source: Path | None,
        shard: Shard = UNSHARDED,
        derived_from: bytes = b"",
        shared: SharedModel | None = None,
    ):
        self.model, self.source, self.shard, self.derived_from, self.shared = model, source, shard, derived_from, shared
        self.version = 0
        self.identity = uuid4().bytes if source is None else identity_of(source)
        if derived_from:
            self.identity = blake2b(self.identity + derived_from, digest_size=len(self.identity)).digest()
        # Released tensors: their shapes, and their content on the host unless that was released too.
        self._shapes: dict[str, torch.Size] = {}
        self._on_host: dict[str, Tensor] = {}
        self._published: tuple[bytes, str | None] = (b"", None)  # identity and id of the last version of a folder
        self._push: Push | None = None
        self._receiver: Receiver | None = None  # of the last push that was broadcast

    @property
    def _written(self) -> Glm5:
        """The model that updates write."""
        return self.model if self.shared is None else self.shared.theirs

    def stage(self, folder: Path) -> "Future[Staged]":
        """See `WeightSource`. Raises CheckpointError or ConfigError for damaged or unsuitable weights."""
        if folder.name != MARKER:
            return self._in_background(lambda: stage(self.model, folder, self.shard))
        identity, base = self._published
        held = self.version, base if identity == self.identity else None
        return self._in_background(lambda: stage_version(folder, self.model, held, self.shard))

    def swap(self, staged: Staged, version: int) -> None:
        replace(self._written, staged)
        self._adopt(version)
        self._published = self.identity, staged.id

    def prepare(self, push: PushCall) -> "Future[bool]":
        buckets = [
            [TensorEntry(one.name, one.dtype, one.shape, str(push.buffers[i % 2]), one.start, one.stop) for one in each]
            for i, each in enumerate(push.buckets)
        ]

        def prepare() -> bool:
            if push.address is None:
                source = SharedMemory(Path(f"/proc/{push.pid}/fd"), self.model.device)
            else:
                source = self._receiver_at(push.address)
            self._push = Push(self._written, source, buckets, self.shard)
            return self._push.is_complete

        return self._in_background(prepare)

    def _in_background(self, action: "Callable[[], Result]") -> "Future[Result]":
        def act() -> Result:
            with current(self.model.device):
                return action()

        return in_background(act, "glm5-weights")

    def _receiver_at(self, address: tuple[str, int]) -> Receiver:
        if self._receiver is None or self._receiver.address != address:
            self._receiver = Receiver(address, self.shard.rank, self.shard.size, self.model.device)
        return self._receiver

    def check_sum(self, number: int, checksum: int) -> "Future[None]":
        assert self._push is not None, "not prepared"
        return self._in_background(partial(self._push.check_sum, number, checksum))

    def write(self, number: int) -> "Future[None]":
        assert self._push is not None, "not prepared"
        return self._in_background(partial(self._push.write, number))

    def end_push(self, version: int | None) -> None:
        if self._push is not None:
            self._push.source.end(failed=version is None)
            self._push = None
        if version is not None:
            self._adopt(version)

    def _adopt(self, version: int) -> None:
        if self.shared is not None:
            self.shared.adopt()
        self.version, self.identity = version, uuid4().bytes

    def take_changes(self, version: int, *, closely: bool) -> bool:
        if self.shared is None or not self.shared.has_changed(closely=closely):
            return False
        self.shared.adopt()
        self.version, self.identity = version, uuid4().bytes
        return True

    def check_source(self) -> None:
        if self.source is None:
            raise RequestError(
                "sleep level 2 drops the weights, and these came from memory: they could not be read again; use level 1"
            )
        if self.derived_from:
            raise RequestError(
                "sleep level 2 drops the weights, and these are not the checkpoint's alone, but random or with an "
                "adapter: they could not be read again; use level 1"
            )

    def release(self, level: int) -> int:
        """Level 1 moves weights on a GPU to host memory, level 2 drops them; `restore` reads them from their folder."""
        num_bytes = release_native(self.model) if level == 2 else 0
        if self.shared is not None or (level == 1 and self.model.device.type == "cpu"):
            return num_bytes
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if name not in self._shapes:
                num_bytes += tensor.numel() * tensor.element_size()
                self._shapes[name] = tensor.shape
                if level == 1:
                    self._on_host[name] = tensor.detach().cpu()
                tensor.data = tensor.data.new_empty(0)
        if level == 2:
            num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in self._on_host.values())
            self._on_host.clear()
        _return_freed(self.model.device)
        return num_bytes

    def restore(self) -> bool:
        """Dropped weights are read from the original checkpoint: updates are lost, and the version is 0 again."""
        if not self._shapes:
            return False
        with restoring("the weights", self._give_back):
            for name, tensor in self.model.state_dict(keep_vars=True).items():
                tensor.data = tensor.data.new_empty(self._shapes[name])
                if name in self._on_host:
                    tensor.data.copy_(self._on_host[name])
            is_other = not self._on_host and self._read_again()
        self._shapes, self._on_host = {}, {}
        return is_other

    def _give_back(self) -> None:
        for tensor in self.model.state_dict(keep_vars=True).values():
            tensor.data = tensor.data.new_empty(0)
        _return_freed(self.model.device)

    def _read_again(self) -> bool:
        assert self.source is not None
        identity = identity_of(self.source)
        read_all(self.model, self.source, self.shard)
        if self.version:
            logger.warning("weights of version %d were dropped by sleep; now those of %s", self.version, self.source)
        is_other = (self.version, self.identity) != (0, identity)
        self.version, self.identity = 0, identity
        return is_other


def _return_freed(device: torch.device) -> None:
    """Return freed memory to the system; allocators would keep it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
