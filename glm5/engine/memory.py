"""Memory that can be given back while tensors over it live on, and taken again at the same place.

On a CPU it is a mapping of its own, whose pages the kernel drops when told so; on a GPU the storage is shrunk to zero.
"""

import mmap
import sys

import torch


class Memory:
    """`bytes`, uint8 [num_bytes], all zeros. Views of it stay valid through `release` and `restore`."""

    def __init__(self, num_bytes: int, device: torch.device):
        if device.type == "cpu":
            self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        else:
            self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def release(self) -> None:
        """Give the memory back. Until `restore`, nothing may read or write it."""
        if self.bytes.device.type == "cpu":
            self._mapping.madvise(mmap.MADV_DONTNEED)
        else:
            self.bytes.untyped_storage().resize_(0)
            torch.cuda.empty_cache()  # else torch would keep it for itself

    def restore(self) -> None:
        """Take the memory again, filled with zeros."""
        if self.bytes.device.type != "cpu":
            self.bytes.untyped_storage().resize_(self.bytes.numel())
        if self.bytes.device.type != "cpu" or sys.platform != "linux":  # Linux hands out zeros
            self.bytes.zero_()
