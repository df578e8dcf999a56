"""Microseconds of one launch in a CUDA graph of many launches over rotating inputs, like the graph of a decode step.

The inputs of a round are several times the L2 cache, so each launch reads its own from device memory. The time of a
launch includes the gap before it, about a microsecond in a graph.
"""

from collections.abc import Callable

import torch

from glm5.bench.kernels.case import Case

_LAUNCHES = 150  # of a graph, minimum
_REPLAYS = 12
_CACHES = 4  # inputs of a round, in L2 sizes
_MAX_SETS = 48
_MEMORY = 24 << 30  # bytes of inputs of a round


def measure(case: Case, launches_a_graph: int = _LAUNCHES, replays: int = _REPLAYS) -> tuple[float, float, float]:
    """(median, 20th, 80th percentile) over replays of microseconds a launch."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    wanted = min(_MAX_SETS, max(2, -(-_CACHES * l2 // case.num_bytes)))
    launches = [case.make(i) for i in range(max(1, min(wanted, _MEMORY // case.num_bytes)))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, -(-launches_a_graph // len(launches)))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for launch in launches:
                launch()
    graph.replay()
    times = sorted(milliseconds(graph.replay) for _ in range(replays))
    to_micros = 1e3 / (rounds * len(launches))
    p50, p20, p80 = (times[round(q * (len(times) - 1))] * to_micros for q in (0.5, 0.2, 0.8))
    return p50, p20, p80


def milliseconds(run: Callable[[], object]) -> float:
    """Of what one call of `run` enqueues, between two CUDA events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)
