"""The time of steps by CUDA events, and of their kernels by the profiler."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

_STEPS = 30


@dataclass(frozen=True)
class Timed:
    """Median milliseconds of a step on the GPU, and mean milliseconds of the host to enqueue it."""

    gpu_ms: float
    host_ms: float


@dataclass(frozen=True)
class Kernel:
    """`micros` and `launches` per step."""

    name: str
    micros: float
    launches: float


def timed(step: Callable[[], None], num_steps: int = _STEPS) -> Timed:
    """Times of successive steps with a queue that never runs empty."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    # The sleep keeps the device busy until the host is ahead of it.
    torch.cuda._sleep(int(4e7))  # pyright: ignore[reportPrivateUsage]
    events[0].record()
    began = time.perf_counter()
    for event in events[1:]:
        step()
        event.record()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    times = sorted(first.elapsed_time(last) for first, last in pairwise(events))
    return Timed(times[len(times) // 2], 1e3 * host / num_steps)


def kernels_of(step: Callable[[], None], num_steps: int = 5) -> list[Kernel]:
    """Every kernel of a step, the longest first."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    micros, launches = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            micros[event.name] += event.device_time_total
            launches[event.name] += 1
    found = [Kernel(name, micros[name] / num_steps, launches[name] / num_steps) for name in micros]
    return sorted(found, key=lambda kernel: -kernel.micros)
