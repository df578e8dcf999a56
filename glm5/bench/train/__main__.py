"""`python -m glm5.bench.train WHAT...`: training on one GPU.

layer      a layer of GLM-5 with all of its experts: forward and backward, dense and sparse; the optimizer; q_b_proj
memory     attention with its gradient at 16K, 64K and 200K tokens
small      steps of a model with 100M active parameters
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from glm5.bench.train.layer import layer_figures, optimizer_figures, split_figures
from glm5.bench.train.memory import memory_figures
from glm5.bench.train.small import small_figures
from glm5.common.console import out

Case = Callable[[], dict[str, Any]]


def cases(what: str, num_tokens: int) -> Iterator[Case]:
    if what == "layer":
        yield split_figures
        for stage in ("dense", "sparse"):
            yield lambda stage=stage: layer_figures(num_tokens, stage=stage)
        yield optimizer_figures
    elif what == "memory":
        for length in (16_384, 65_536, 204_800):
            yield lambda length=length: memory_figures(length, dense=False)
        for length in (16_384, 65_536):
            yield lambda length=length: memory_figures(length, dense=True)
    else:
        for stage, seq_len, sequences in (
            ("dense", 4096, 16),
            ("warmup", 4096, 16),
            ("sparse", 4096, 16),
            ("sparse", 16384, 4),
        ):
            yield lambda case=(stage, seq_len, sequences): small_figures(*case)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="glm5.bench.train", description=__doc__)
    parser.add_argument("what", nargs="*", choices=["layer", "memory", "small"], default=["layer", "memory", "small"])
    parser.add_argument("--tokens", type=int, default=8192, help="of the layer's one sequence")
    args = parser.parse_args(argv)
    for what in args.what:
        for case in cases(what, args.tokens):
            out(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in case().items()}))
            gc.collect()
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
