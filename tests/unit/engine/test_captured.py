"""What a capture is kept from, and what happens where it is disturbed all the same. CUDA is stood in for."""

import gc
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from glm5.engine.runner.graphs.captured import Graphs

DISTURBED, OUT_OF_MEMORY = 901, 2


@pytest.fixture
def graphs(monkeypatch):
    """Graphs of a device whose captures end in the errors of `failures`, one after another, and then succeed."""
    failures: list[int] = []
    pools, ended = count(), []
    stream = SimpleNamespace(wait_stream=lambda _other: None)

    @contextmanager
    def graph(_graph, *, pool, **_options):
        assert pool not in ended
        yield
        if failures:
            error = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture\nmore")
            error.error_code = failures.pop(0)
            raise error

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device, priority: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _device, pool: ended.append(pool), raising=False)
    cache = SimpleNamespace(device=torch.device("meta"))
    return Graphs(passes=SimpleNamespace(), cache=cache, captures=True), failures


def test_nothing_is_collected_during_a_capture(graphs):
    """A graph that the collector destroys on the thread that captures ends the capture."""
    there, _ = graphs
    collects = []
    assert gc.isenabled()
    there.capture("a", lambda: collects.append(gc.isenabled()), warm=True)
    assert collects == [False, False]
    assert gc.isenabled()
    gc.disable()
    try:
        there.capture("b", lambda: None, warm=False)
        assert not gc.isenabled(), "the caller's choice"
    finally:
        gc.enable()


def test_a_capture_that_others_disturb_is_tried_again(graphs, caplog):
    there, failures = graphs
    failures += [DISTURBED, DISTURBED]
    there.capture("a", lambda: None, warm=False)
    assert there.has("a")
    assert there.num_captured == 1
    assert [record.message.count("during capture); trying again") for record in caplog.records] == [1, 1]


@pytest.mark.parametrize("found", [[OUT_OF_MEMORY], [DISTURBED] * 5])
def test_other_errors_and_lasting_ones_are_raised(graphs, found):
    there, failures = graphs
    failures += found
    with pytest.raises(torch.AcceleratorError):
        there.capture("a", lambda: None, warm=False)
    assert not there.has("a")
    assert not failures
    assert gc.isenabled()
