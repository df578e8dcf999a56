"""Before an engine is ready: every shape of a step is run once by nobody's rows, and decoding steps are captured.

So kernels are compiled, libraries have chosen theirs, and memory that steps need is taken before anybody waits.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from glm5.engine.runner import Runner
from glm5.engine.scheduler_config import SchedulerConfig
from glm5.kernels.kernel_count import mark_ready

_MIB = 1 << 20
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Warmth:
    """What warming up took: seconds of either part, graphs, kernels made ready, bytes of the device's memory."""

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
def warm_up(runner: Runner, config: SchedulerConfig, on_progress: Progress) -> Warmth | None:
    """None where steps are not captured: then there is nothing to do that a first step would not do as well."""
    steps, prompts = runner.steps, runner.prompts
    if steps is None or prompts is None or not steps.graphs.captures:
        return None
    free, _ = torch.cuda.mem_get_info(runner.cache.device)
    began = time.monotonic()
    buckets = sorted({config.token_bucket(count) for count in range(1, config.max_tokens_per_step + 1)})
    shapes = prompts.shapes(buckets)
    for done, shape in enumerate(shapes, start=1):
        prompts.run_nobody(shape)
        on_progress("compiling kernels", done / len(shapes))
    torch.cuda.synchronize(runner.cache.device)
    torch.cuda.empty_cache()  # graphs have memory of their own
    warm = time.monotonic()
    counts = sorted({config.batch_bucket(count) for count in range(1, config.max_num_seqs + 1)})
    for done, of in steps.capture_all(counts, range(config.max_depth, -1, -1)):
        on_progress("capturing decoding steps", done / of)
    for done, of in prompts.capture_all(buckets):
        on_progress("capturing prompts", done / of)
    torch.cuda.synchronize(runner.cache.device)
    left, _ = torch.cuda.mem_get_info(runner.cache.device)
    ended = time.monotonic()
    return Warmth(warm - began, ended - warm, steps.graphs.num_captured, mark_ready(), max(0, free - left))
