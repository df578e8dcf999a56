"""`python -m glm5.bench.train WHAT...`: training on GPUs.

layer      a layer of GLM-5 with all of its experts: forward and backward, dense and sparse; the optimizer; q_b_proj
memory     attention with its gradient at 16K, 64K and 200K tokens
small      steps of recipes/active-100m.toml's model, stage by stage, on random tokens; `glm5 train` trains it
ordered    the same in deterministic mode beside the default; CUBLAS_WORKSPACE_CONFIG=:4096:8 must be set
shape      steps of a model with 30 billion parameters on all GPUs of this machine
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from glm5.bench.command import command, need_gpus
from glm5.bench.train.layer import layer_results, optimizer_results, split_results
from glm5.bench.train.memory import memory_results
from glm5.bench.train.shape import FLASH, shape_results
from glm5.bench.train.small import ordered_results, small_results
from glm5.common.console import out

Case = Callable[[], dict[str, Any]]


def cases(what: str, num_tokens: int, num_layers: int, passes: int, sequences: int) -> Iterator[Case]:
    if what == "layer":
        yield split_results
        for stage in ("dense", "sparse"):
            yield lambda stage=stage: layer_results(num_tokens, stage=stage)
        yield optimizer_results
    elif what == "memory":
        for length in (16_384, 65_536, 204_800):
            for dense in (False, True):
                yield lambda length=length, dense=dense: memory_results(length, dense=dense)
    elif what == "shape":
        yield lambda: shape_results(num_layers, passes, sequences)
    elif what == "ordered":
        for stage in ("dense", "sparse"):
            yield lambda stage=stage: ordered_results(stage, 4096, 8)
    else:
        for stage, seq_len, sequences in (
            ("dense", 4096, 16),
            ("warmup", 4096, 16),
            ("sparse", 4096, 16),
            ("sparse", 16384, 4),
        ):
            yield lambda case=(stage, seq_len, sequences): small_results(*case)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="glm5.bench.train", description=__doc__)
    kinds = ["layer", "memory", "small", "ordered", "shape"]
    parser.add_argument("what", nargs="+", choices=kinds)
    parser.add_argument("--tokens", type=int, default=8192, help="of the layer's one sequence")
    layers = FLASH["num_hidden_layers"]
    parser.add_argument("--layers", type=int, default=layers, help="of the shape; fewer where memory is less")
    parser.add_argument("--passes", type=int, default=2, help="of a GPU in a step of the shape")
    parser.add_argument("--sequences", type=int, default=1, help="of 4,096 tokens in each pass of the shape")
    args = parser.parse_args(argv)
    need_gpus("a benchmark of training")
    for what in args.what:
        for case in cases(what, args.tokens, args.layers, args.passes, args.sequences):
            out(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in case().items()}))
            gc.collect()
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
