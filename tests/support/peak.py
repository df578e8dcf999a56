"""The most bytes that tensors made inside the block held at one time, on any device: counted, not sampled."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Peak:
    """Bytes at most; storages that existed before the block do not count."""

    at_most: int = 0
    _live: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)

    def saw(self, value: object, old: set[int]) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference.cdata not in old and reference.cdata not in self._live:
                self._live[reference.cdata] = (reference, storage.nbytes())

    def settle(self) -> None:
        self._live = {key: (one[0], self.size(*one)) for key, one in self._live.items() if not one[0].expired()}
        self.at_most = max(self.at_most, sum(nbytes for _, nbytes in self._live.values()))

    def size(self, _reference: StorageWeakRef, nbytes: int) -> int:
        """Of a storage that lives, and had so many bytes when it was made."""
        return nbytes


class Resized(Peak):
    """Where storages are made larger and smaller, as FSDP does; slower."""

    def size(self, reference: StorageWeakRef, nbytes: int) -> int:
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        return 0 if storage is None else storage.nbytes()


class _Watch(TorchDispatchMode):
    def __init__(self, peak: Peak):
        super().__init__()
        self.peak = peak

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            StorageWeakRef(one.untyped_storage()).cdata
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            self.peak.saw(value, given)
        self.peak.settle()
        return out


@contextmanager
def peak_bytes(peak: Peak | None = None) -> Iterator[Peak]:
    peak = Peak() if peak is None else peak
    with _Watch(peak):
        yield peak
