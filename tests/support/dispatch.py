"""What torch allocates, and which implementations `auto` chooses."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm5.kernels import dispatch
from glm5.kernels.dispatch import Table


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


def as_on(monkeypatch: pytest.MonkeyPatch, *kinds: dispatch.Machine) -> None:
    """`auto` takes all tensors to be on a machine of these kinds."""
    monkeypatch.setattr(dispatch, "machine_of", lambda *_: frozenset({"any", *kinds}))
    for table in dispatch.TABLES.values():
        monkeypatch.setattr(table, "_on_cpu", table._rules(torch.device("cpu"), torch.float32))
        monkeypatch.setattr(table, "_on_gpu", {})


def chosen_by(table: Table, *given: object) -> str:
    """The file that `auto` stands for."""
    return table.module("auto", *given).__name__.rpartition(".")[2]
