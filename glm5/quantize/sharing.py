"""Work that several devices share: each has a thread, and takes every so-manyth job."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")


def shared(
    devices: Sequence[torch.device], jobs: Sequence[Job], work: Callable[[Job, torch.device], Result]
) -> list[Result]:
    """`work` of every job, on the device that has it; results in the order of the jobs. The first error is raised."""

    def of_device(number: int) -> list[Result]:
        device = devices[number]
        # Triton and libraries launch on a thread's device, wherever tensors lie.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return [work(job, device) for job in jobs[number :: len(devices)]]

    if len(devices) == 1:
        return of_device(0)
    with ThreadPoolExecutor(len(devices)) as workers:
        parts = list(workers.map(of_device, range(len(devices))))
    return [parts[idx % len(devices)][idx // len(devices)] for idx in range(len(jobs))]
