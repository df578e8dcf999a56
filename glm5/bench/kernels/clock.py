"""Microseconds of one launch: a CUDA graph of many launches over rotating inputs, as a decode step is one of many ops.

The inputs of a round are several times the L2 cache, so each launch finds its own in device memory. What a launch
costs then includes the gap before it, which in a graph is about a microsecond.
"""

import torch

from glm5.bench.kernels.case import Case

_LAUNCHES = 150  # in a graph, at least
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
    times = sorted(_milliseconds(graph) for _ in range(replays))
    to_micros = 1e3 / (rounds * len(launches))
    p50, p20, p80 = (times[round(q * (len(times) - 1))] * to_micros for q in (0.5, 0.2, 0.8))
    return p50, p20, p80


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)
