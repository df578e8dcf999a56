"""Uninitialised memory is NaN: a kernel that reads what it did not write fails here and not on someone's machine."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poison():
    # torch fills the results of empty() with NaN in this mode (fill_uninitialized_memory is on by default).
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
def gen(seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
