"""Prompts on GPUs that share GLM-5, including collectives: `python -m glm5.bench.steps.shared`.

One process a GPU, one model with random weights. Rows are sharded over ranks (engine/runner/fused/row_sharding.py) and,
for comparison, replicated. Before a case is timed, hidden states must be equal on all ranks and close between both
modes.

`--of N` gives each rank the widths of one rank of N, to measure a larger machine's shapes on fewer GPUs.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from glm5.bench.command import command, need_gpus
from glm5.bench.ranks import run_ranks
from glm5.bench.steps.breakdown import kernels_of, timed
from glm5.bench.steps.case import Prompts, StepCase, rank_config
from glm5.common.console import out
from glm5.engine.runner.fused import row_sharding
from glm5.parallel.group import Group
from glm5.parallel.rendezvous import open_group, store_at
from glm5.parallel.table import Shard
from glm5.testing.numerics import rel_rms

SECONDS = 300
# Relative RMS. Both modes sum in different orders, and with random weights the last bit changes codes and chosen
# experts of later layers: 0.07 and 0.09 after 6 layers, 0.25 after 12. Unrelated rows would be 1.4 apart.
BUDGET = 0.5
_SHOWN = 24  # kernels of a breakdown


def rank_main(group: Group, of: int, layers: Sequence[int], loads: Sequence[Prompts]) -> None:
    is_first = group.shard.rank == 0
    for count in layers:
        cfg = rank_config(of // group.shard.size, count)
        case = StepCase(cfg, loads, fp8=True, device=f"cuda:{group.shard.rank}", group=group)
        for load in loads:
            found: dict[str, Tensor] = {}
            for mode, min_rows in (("replicated", sys.maxsize), ("sharded", row_sharding.MIN_SHARDED_ROWS)):
                found[mode], milliseconds = _measured(
                    case, group, load, min_rows, show_kernels=is_first and count == layers[0]
                )
                if is_first:
                    out(
                        f"{count} layers, {load.num_tokens} tokens to {load.context}, rows {mode}: "
                        f"{milliseconds:.3f} ms"
                    )
            error = rel_rms(found["sharded"], found["replicated"].double())
            assert error < BUDGET, f"{error=}"
            if is_first:
                out(f"  hidden states of both modes are {error:.4f} apart, equal on all ranks")
        del case
        torch.cuda.empty_cache()


def _measured(
    case: StepCase, group: Group, load: Prompts, min_rows: int, *, show_kernels: bool
) -> tuple[Tensor, float]:
    """(hidden states, milliseconds of a step)."""
    usual, row_sharding.MIN_SHARDED_ROWS = row_sharding.MIN_SHARDED_ROWS, min_rows
    case.runner.passes.generation += 1  # graphs are captured anew
    try:
        plan, specs = case.enter(load)
        step = partial(case.step, plan, specs, load)
        hidden_TD = case.hidden(plan, load)
        others = group.all_gather(hidden_TD)
        assert all(torch.equal(other, hidden_TD) for other in others), "ranks differ"
        milliseconds = timed(step).gpu_ms
        kernels = kernels_of(step)  # by all ranks, as they wait for each other
        for kernel in kernels[: _SHOWN * show_kernels]:
            out(f"  {kernel.micros:8.1f} us {kernel.launches:6.1f} x  {kernel.name[:90]}")
    finally:
        row_sharding.MIN_SHARDED_ROWS = usual
    return hidden_TD, milliseconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m glm5.bench.steps.shared")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--of", type=int, help="GPUs whose widths each rank has, a multiple of --ranks")
    parser.add_argument("--layers", type=int, nargs="+", default=[6])
    parser.add_argument("--prompt", type=int, nargs="+", default=[2048], help="tokens of a prompt")
    parser.add_argument("--start", type=int, default=0, help="tokens of the prompts that are in the cache already")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="prompts of a step")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    need_gpus("a benchmark of steps", max(1, given.ranks))
    of = given.ranks if given.of is None else given.of
    if of % given.ranks:
        parser.error(f"--of {of} is not a multiple of --ranks {given.ranks}")
    if given.rank is not None:
        device = torch.device("cuda", given.rank)
        shard = Shard(given.rank, given.ranks)
        group = open_group(shard, device, store_at(given.port, given.ranks), timeout_s=SECONDS)
        loads = [Prompts(batch, length, given.start) for length in given.prompt for batch in given.batch]
        rank_main(group, of, given.layers, loads)
        torch.cuda.synchronize()
        group.close()
        return 0
    arguments = ["--of", str(of), "--layers", *map(str, given.layers), "--prompt", *map(str, given.prompt)]
    arguments += ["--start", str(given.start), "--batch", *map(str, given.batch)]
    return run_ranks("glm5.bench.steps.shared", given.ranks, arguments)


if __name__ == "__main__":
    sys.exit(command(main))
