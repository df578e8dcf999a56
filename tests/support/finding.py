"""What an engine does before its kernels run, on a machine without a GPU: `python -m tests.support.finding WEIGHTS`,
fp8 or a recipe of codes.

Triton is told that its driver is a Hopper GPU's. Kernels are found by running every shape of a step on the CPU, which
launches none of them; the first of each name travels to the processes that compile, and this one then asks for an entry
on disk that is there already. Prints how many were found, and how many names.
"""

import importlib
import itertools
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import glm5.kernels
from glm5.bench.steps.case import with_codes
from glm5.checkpoint.dummy import dummy
from glm5.common.console import out
from glm5.config.presets import preset
from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.runner import Runner
from glm5.kernels.compile_ahead import Compilers, missing
from tests.support.dispatch import as_on

DEPTH, COMPILED = 2, 2


class Hopper:
    """As much of a driver as finding kernels needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _chosen(*tensors: Tensor) -> bool:
    asks = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not asks and all(tensor.dtype != torch.float64 for tensor in tensors)


def main() -> None:
    known: Any = driver
    known.set_active(Hopper())
    for module in pkgutil.walk_packages(glm5.kernels.__path__, "glm5.kernels."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    for module in [module for name, module in sys.modules.items() if name.startswith("glm5.")]:
        if hasattr(module, "chosen"):
            vars(module)["chosen"] = _chosen
    as_on(pytest.MonkeyPatch(), "triton")
    cfg = preset("nano").model_copy(update={"max_position_embeddings": 1024})
    weights = sys.argv[1]
    model = dummy(cfg if weights == "fp8" else with_codes(cfg, weights), fp8=True)
    cache = KVCache(cfg, 40, dtype=model.dtype, mtp=True)
    runner = Runner(model, cache, max_num_seqs=4, max_model_len=1024, max_depth=DEPTH, fused=True)
    prompts, steps, lowered = runner.prompts, runner.steps, runner.passes.fused
    assert prompts is not None and steps is not None and lowered is not None  # noqa: PT018
    with torch.inference_mode(), lowered.few_layers(), missing() as wanted:
        for shape in prompts.shapes([8, 128]):
            prompts.run_padding(shape)
        for _ in steps.run_padding([1, 4], [DEPTH, 0]):
            pass
    names = {one.fn.__name__ for one in wanted}
    few = [next(one for one in wanted if one.fn.__name__ == name) for name in itertools.islice(sorted(names), COMPILED)]
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    with Compilers(COMPILED) as compilers:
        compilers.compile(few, lambda _done: None)
    before = set(folder.iterdir())
    for one in few:
        one.compile()
    assert set(folder.iterdir()) == before, "other names than the process asks for"
    out(f"{len(wanted)} {len(names)} {len(before)}")


if __name__ == "__main__":
    main()
