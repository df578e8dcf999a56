"""How long a box takes to start: `python -m glm5.bench.boxes [STARTS]`, for each kind that works here.

call: what the call that makes a box takes, after which the box starts beside the caller. start: from that call until
the box is ready. first run: /bin/true in it. Processor: time of all processes of a box, from start to end, which says
more than wall time on a machine that does other things too.
"""

import resource
import statistics
import sys
import time
from pathlib import Path

from glm5.common import console
from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.choice import candidates, reason_against
from glm5.rl.sandbox.sandbox import Sandbox


def measure(backend: Backend, starts: int) -> str:
    """One line of figures, in milliseconds."""
    times: dict[str, list[float]] = {"call": [], "start": [], "first run": []}
    before = _processor_ms()
    for _ in range(starts):
        begun = time.perf_counter()
        with Sandbox(backend) as box:
            called = time.perf_counter()
            box.wait()
            ready = time.perf_counter()
            box.run(["/bin/true"])
            ran = time.perf_counter()
        for name, seconds in zip(times, (called - begun, ready - begun, ran - ready), strict=True):
            times[name].append(1e3 * seconds)
    own_ms = (_processor_ms() - before) / starts
    spreads = ", ".join(f"{name} {_spread(values)}" for name, values in times.items())
    return f"{backend.kind}: {spreads}, processor {own_ms:.1f} ms a box, of {starts}"


def _spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"median {statistics.median(ordered):.1f} p90 {ordered[int(0.9 * (len(ordered) - 1))]:.1f} ms"


def _processor_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (used.ru_utime + used.ru_stime)


def main() -> None:
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    console.out(f"{len(names)} x {names[0] if names else 'unknown processor'}")
    for backend in candidates():
        console.out(f"{backend.kind}: {reason}" if (reason := reason_against(backend)) else measure(backend, starts))


if __name__ == "__main__":
    main()
