"""Memory that can be released while tensors over it stay alive, and allocated again under the same tensors.

On a CPU it is an anonymous mapping, whose pages `madvise` frees; on a GPU the storage is resized to zero.
"""

import ctypes
import mmap
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from glm5.common.errors import GlmError, is_of_memory, words_of


@contextmanager
def restoring(what: str, release: Callable[[], object]) -> Iterator[None]:
    """Allocate memory for `what` again. If that fails, call `release`; a lack of memory becomes a GlmError."""
    try:
        yield
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # their locals hold some of the memory
        release()
        if not is_of_memory(error):
            raise
        raise GlmError(
            f"there is no memory for {what} ({words_of(error)}); end what took it meanwhile, and call wake_up again"
        ) from None


class Memory:
    """`bytes`, uint8 [num_bytes], all zeros. Its views stay valid through `release` and `restore`."""

    def __init__(self, num_bytes: int, device: torch.device):
        if device.type == "cpu":
            self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        else:
            self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def release(self) -> int:
        """Release the memory; returns the freed bytes. Until `restore`, nothing may read or write it."""
        if self.bytes.device.type == "cpu":
            num_bytes = _resident_bytes(self.bytes)
            self._mapping.madvise(mmap.MADV_DONTNEED)
            return num_bytes
        num_bytes = self.bytes.untyped_storage().nbytes()
        self.bytes.untyped_storage().resize_(0)
        torch.cuda.empty_cache()  # otherwise torch's allocator keeps it
        return num_bytes

    def restore(self) -> None:
        """Allocate the memory again, filled with zeros."""
        if self.bytes.device.type != "cpu":
            self.bytes.untyped_storage().resize_(self.bytes.numel())
        if self.bytes.device.type != "cpu" or sys.platform != "linux":  # Linux provides zeros
            self.bytes.zero_()


def _resident_bytes(block: torch.Tensor) -> int:
    """How many bytes of a mapping are in memory: Linux allocates a page when it is first written to."""
    found = np.zeros(-(-block.numel() // mmap.PAGESIZE), dtype=np.uint8)
    try:
        mincore = ctypes.CDLL(None).mincore
    except (OSError, AttributeError):  # no such call here: report all of it
        return block.numel()
    where = ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(block.numel()), ctypes.c_void_p(found.ctypes.data)
    if mincore(*where):
        return block.numel()
    return min(int((found & 1).sum()) * mmap.PAGESIZE, block.numel())
