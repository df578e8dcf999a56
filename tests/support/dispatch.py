"""Watching what torch allocates."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Largest:
    """The largest memory that an operation took for a result, and that operation; `total_bytes` of all of them."""

    num_bytes: int = 0
    op: str = ""
    total_bytes: int = 0


@contextmanager
def largest_result() -> Iterator[Largest]:
    """Notes what operations allocate for their results; views and results in place count nothing."""
    largest = Largest()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            result = func(*args, **(kwargs or {}))
            for t in tree_leaves(result):
                if not isinstance(t, torch.Tensor) or t.untyped_storage().data_ptr() in known:
                    continue
                num_bytes = t.untyped_storage().nbytes()
                largest.total_bytes += num_bytes
                if num_bytes > largest.num_bytes:
                    largest.num_bytes, largest.op = num_bytes, str(func)
            return result

    with Watch():
        yield largest
