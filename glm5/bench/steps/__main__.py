"""`python -m glm5.bench.steps`: milliseconds of steps, and time by kernel."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from glm5.bench.command import command, need_gpus
from glm5.bench.latency.expert_coverage import expected_experts
from glm5.bench.steps.breakdown import kernels_of, timed
from glm5.bench.steps.case import Load, Prompts, StepCase, rank_config, with_codes
from glm5.common.console import out
from glm5.config.bench import RECIPES
from glm5.config.presets import preset

_SHOWN = 24  # kernels of a breakdown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m glm5.bench.steps")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, nargs="+", default=[6], help="two numbers project the whole model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[2304])
    parser.add_argument("--prompt", type=int, nargs="+", help="steps of whole prompts of these lengths instead")
    parser.add_argument("--start", type=int, default=0, help="tokens of the prompts that are in the cache already")
    parser.add_argument("--depth", type=int, default=0)
    kinds = ["fp8", "bfloat16", *RECIPES]
    parser.add_argument(
        "--dtype", choices=kinds, default="fp8", help="of the weights; names of glm5 quantize's recipes"
    )
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8_key", "fp8"], default="auto")
    parser.add_argument("--anatomy", type=int, nargs="*", default=[1], help="batches that are taken apart")
    parser.add_argument("--max-keys", type=int, default=1 << 20, help="no load with more tokens in the cache")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpus("a benchmark of steps")
    loads: list[Load | Prompts]
    if args.prompt:
        loads = [Prompts(batch, length, args.start) for length in args.prompt for batch in args.batch]
    else:
        loads = [Load(batch, context, args.depth) for context in args.context for batch in args.batch]
    loads = [load for load in loads if load.batch * load.context <= args.max_keys]
    found: list[dict[str, Any]] = []
    for count in args.layers:
        cfg = rank_config(args.ranks, count)
        cfg = with_codes(cfg, args.dtype) if args.dtype in RECIPES else cfg
        case = StepCase(cfg, loads, fp8=args.dtype != "bfloat16", layout=args.kv_cache_dtype)
        out(f"{count} layers, {args.dtype} weights, {args.kv_cache_dtype} cache, one of {args.ranks} ranks")
        for load in loads:
            anatomy = load.batch in args.anatomy and count == args.layers[0]
            found.append({"layers": count, **_measure(case, load, anatomy=anatomy)})
        del case
        torch.cuda.empty_cache()
    if len(args.layers) == 2:
        _project(found, loads, *args.layers)
    if args.json is not None:
        about = {name: str(value) for name, value in vars(args).items()} | {"gpu": torch.cuda.get_device_name()}
        args.json.write_text(json.dumps({"about": about, "steps": found}, indent=1))
    return 0


def _measure(case: StepCase, load: Load | Prompts, *, anatomy: bool) -> dict[str, Any]:
    plan, specs = case.enter(load)
    step = lambda: case.step(plan, specs, load)  # noqa: E731
    time = timed(step)
    line = f"batch {load.batch:4} context {load.context:7} depth {load.depth}: {time.gpu_ms:7.3f} ms"
    found: dict[str, Any] = {**asdict(load), **asdict(time)}
    if isinstance(load, Prompts):
        out(f"{line}, host {time.host_ms:.3f}; {load.num_tokens} tokens of prompts from {load.start} on")
    else:
        distinct = case.experts(load)
        even = expected_experts(case.runner.model.cfg, load.batch * (1 + load.depth))
        case.enter(load)
        out(f"{line}, host {time.host_ms:.3f}; experts {[round(n) for n in distinct]} of {even:.1f} expected")
        found |= {"experts": distinct, "expected_experts": even}
    if anatomy:
        kernels = kernels_of(step)
        total = sum(kernel.micros for kernel in kernels)
        count = sum(kernel.launches for kernel in kernels)
        out(f"  {count:.0f} kernels, {total:.0f} us, {1e3 * time.gpu_ms - total:.0f} us between them")
        for kernel in kernels[:_SHOWN]:
            out(f"  {kernel.micros:8.1f} us {kernel.launches:6.1f} x  {kernel.name[:90]}")
        found["kernels"] = [asdict(kernel) for kernel in kernels]
    return found


def _project(found: list[dict[str, Any]], loads: Sequence[Load | Prompts], few: int, more: int) -> None:
    """Print milliseconds projected to all layers, without collectives. All further layers have experts."""
    num_layers = preset("glm-5").num_hidden_layers
    for load, short, long in zip(loads, found[: len(loads)], found[len(loads) :], strict=True):
        layer = (long["gpu_ms"] - short["gpu_ms"]) / (more - few)
        total = short["gpu_ms"] + (num_layers - few) * layer
        short["projected_ms"] = total
        out(
            f"batch {load.batch:4} context {load.context:7}: {1e3 * layer:6.1f} us a layer, {total:6.2f} ms for "
            f"{num_layers}"
        )


if __name__ == "__main__":
    sys.exit(command(main))
