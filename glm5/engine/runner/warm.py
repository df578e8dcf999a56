"""Warm-up of an engine: every shape of a step is run on padding rows, and the most common ones are captured.

    finding kernels      run all shapes on one layer of each kind, but only record kernels that are not compiled
    compiling kernels    compile the missing ones in parallel; ranks split them, and share the results on disk
    loading kernels      run the same shapes again: libraries choose their kernels, and memory is allocated
    capturing            capture decoding steps, then prompts

So no request waits for compiling, loading or allocation.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from glm5.engine.runner.graphs.captured import synchronize
from glm5.engine.runner.graphs.decode import DecodeSteps
from glm5.engine.runner.graphs.passes import PassGraphs
from glm5.engine.runner.graphs.prompts import PromptSteps
from glm5.engine.runner.runner import Runner
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.kernels.compile_ahead import Compilers, missing
from glm5.kernels.kernel_count import mark_ready
from glm5.kernels.triton_support import installed
from glm5.parallel.group import Group, all_reduce_min

_MIB = 1 << 20
_MAX_COMPILERS = 32
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class WarmupReport:
    """The cost of the warm-up: seconds of shapes and graphs, numbers of graphs and kernels, bytes on the device."""

    shapes_s: float
    graphs_s: float
    num_graphs: int
    num_kernels: int
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.num_graphs} captured in {self.graphs_s:.1f} s, {self.num_bytes // _MIB} MiB; {self.num_kernels} "
            f"kernels in {self.shapes_s:.1f} s"
        )


@torch.inference_mode()
def warm_up(runner: Runner, config: SchedulerConfig, group: Group, on_progress: Progress) -> WarmupReport | None:
    """Warm up `runner`. None if steps are not captured: the first steps then do the same work."""
    if runner.pass_graphs is not None:
        return _warm_passes(runner, runner.pass_graphs, on_progress)
    steps, prompts = runner.steps, runner.prompts
    if steps is None or prompts is None or not steps.graphs.captures:
        return None
    device = runner.cache.device
    free, _ = torch.cuda.mem_get_info(device)
    began = time.monotonic()
    buckets = sorted({config.token_bucket(count) for count in range(1, config.max_tokens_per_step + 1)})
    counts = sorted({config.batch_bucket(count) for count in range(1, config.max_num_seqs + 1)})
    depths = range(config.max_depth, -1, -1)
    with _few_layers(runner, steps, prompts):
        if installed():
            with Compilers(_num_compilers(group)) as compilers:
                with missing() as wanted:
                    _run_all_shapes(steps, prompts, buckets, counts, depths, partial(on_progress, "finding kernels"))
                on_progress("compiling kernels", 0.0)
                own = wanted[group.shard.rank :: group.shard.size]
                compilers.compile(own, lambda done: on_progress("compiling kernels", done / len(own)))
                if group.shard.size > 1:
                    all_reduce_min(group, [0], device)  # a barrier: every rank's kernels are then on disk
                    compilers.compile(wanted, lambda _done: None)
        _run_all_shapes(steps, prompts, buckets, counts, depths, lambda share: on_progress("loading kernels", share))
    synchronize(device)
    torch.cuda.empty_cache()  # graphs have a memory pool of their own
    warm = time.monotonic()
    # Depths between 0 and the maximum are rare: their graphs are captured when they are needed.
    for done, of in steps.capture_all(counts, sorted({config.max_depth, 0}, reverse=True)):
        on_progress("capturing decoding steps", done / of)
    for done, of in prompts.capture_all(buckets):
        on_progress("capturing prompts", done / of)
    synchronize(device)
    left, _ = torch.cuda.mem_get_info(device)
    ended = time.monotonic()
    return WarmupReport(warm - began, ended - warm, steps.graphs.num_captured, mark_ready(), max(0, free - left))


def _warm_passes(runner: Runner, graphs: PassGraphs, on_progress: Progress) -> WarmupReport:
    """Passes have one shape and few kernels: the run before each capture compiles them."""
    device = runner.cache.device
    (free, _), began = torch.cuda.mem_get_info(device), time.monotonic()
    for done, of in graphs.capture_all(drafts=runner.max_depth > 0):
        on_progress("capturing passes", done / of)
    assert runner.passes.num_rows is not None
    runner.sample_padding(runner.passes.num_rows)
    synchronize(device)
    left, _ = torch.cuda.mem_get_info(device)
    return WarmupReport(0.0, time.monotonic() - began, graphs.graphs.num_captured, mark_ready(), max(0, free - left))


@contextmanager
def _few_layers(runner: Runner, steps: DecodeSteps, prompts: PromptSteps) -> Iterator[None]:
    """Run only one layer of each kind, without recording routing, since the other layers' would be missing."""
    fused, routing = runner.passes.fused, steps.routing
    assert fused is not None
    steps.routing = prompts.routing = None
    try:
        with fused.few_layers():
            yield
    finally:
        steps.routing = prompts.routing = routing
        if routing is not None:
            routing.clear()


def _run_all_shapes(
    steps: DecodeSteps,
    prompts: PromptSteps,
    buckets: Sequence[int],
    counts: Sequence[int],
    depths: Sequence[int],
    on_share: Callable[[float], None],
) -> None:
    """Run every shape without a graph, on padding."""
    shapes = prompts.shapes(buckets)
    for done, shape in enumerate(shapes, start=1):
        prompts.run_padding(shape)
        on_share(done / len(shapes) / 2)
    for done, of in steps.run_padding(counts, depths):
        on_share((1 + done / of) / 2)


def _num_compilers(group: Group) -> int:
    return max(1, min(_MAX_COMPILERS, (os.cpu_count() or 1) // group.shard.size))
