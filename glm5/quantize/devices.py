"""The devices of a run, and work that they share: each has a thread, and takes every so-manyth job."""

import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from glm5.checkpoint.load import parse_device
from glm5.kernels.current_device import current

Job = TypeVar("Job")
Result = TypeVar("Result")


def on_devices(
    devices: Sequence[torch.device], jobs: Sequence[Job], work: Callable[[Job, torch.device], Result]
) -> list[Result]:
    """`work` of every job, on the device that has it; results in the order of the jobs. The first error is raised."""

    def of_device(number: int) -> list[Result]:
        device = devices[number]
        with current(device):
            return [work(job, device) for job in jobs[number :: len(devices)]]

    if len(devices) == 1:
        return of_device(0)
    with ThreadPoolExecutor(len(devices)) as workers:
        parts = list(workers.map(of_device, range(len(devices))))
    return [parts[idx % len(devices)][idx // len(devices)] for idx in range(len(jobs))]


def parse_devices(name: str) -> list[torch.device]:
    """auto: all GPUs, else the CPU."""
    if name == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
    return [parse_device(part) for part in name.split(",")]


def peak_memory(used: Sequence[torch.device]) -> tuple[int, str]:
    """(bytes of host memory at the highest, the same of devices in words)."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = [torch.cuda.max_memory_allocated(device) for device in used if device.type == "cuda"]
    return host, f"{max(peaks) / 1e9:.2f} GB of a GPU" if peaks else "no GPU"
