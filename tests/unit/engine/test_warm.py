"""What runs before an engine is ready: every kernel is seen on few layers, and nothing that matters is touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.sampling import SamplingParams
from tests.support.models import random_model
from tests.support.running import Bench

DEPTH = 2


@pytest.fixture(scope="module")
def model():
    return random_model(3, preset("nano"))


def test_shapes_of_nobody_leave_everything_as_it_was(model, rng):
    prompts = [[rng.randrange(700) for _ in range(rng.randint(1, 60))] for _ in range(4)]
    params = SamplingParams(temperature=0, max_tokens=10)
    want = Bench(model, depth=DEPTH, fused=True).run(prompts, params)
    bench = Bench(model, depth=DEPTH, fused=True, max_num_seqs=4)
    steps, shapes = bench.runner.steps, bench.runner.prompts.shapes([8, 16])
    with torch.inference_mode(), bench.runner.passes.fused.few_layers():
        for shape in shapes:
            bench.runner.prompts.run_padding(shape)
        assert list(steps.run_padding([1, 4], [DEPTH, 0]))[-1] == (4, 4)
    assert bench.run(prompts, params).tokens == want.tokens


def test_few_layers_are_one_of_each_kind():
    """tiny has a dense layer, then layers with experts: two with an indexer, one without."""
    bench = Bench(random_model(3, preset("tiny")), fused=True)
    fused, called = bench.runner.passes.fused, []
    for layer_idx, layer in enumerate(fused.layers):
        layer.mlp = _Noting(layer.mlp, called, layer_idx)
    with torch.inference_mode(), fused.few_layers():
        bench.runner.prompts.run_padding(bench.runner.prompts.shapes([8])[0])
    assert called == [0, 1, 2]
    with torch.inference_mode():
        bench.runner.prompts.run_padding(bench.runner.prompts.shapes([8])[0])
    assert called[3:] == [0, 1, 2, 3]


class _Noting:
    def __init__(self, mlp, called, layer_idx):
        self.mlp, self.called, self.layer_idx = mlp, called, layer_idx
        self.wants = mlp.wants

    def __call__(self, x, view, row_sharding):
        self.called.append(self.layer_idx)
        return self.mlp(x, view, row_sharding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "least_names"), [("fp8", 20), pytest.param("w4a8-channel", 15, marks=pytest.mark.long)]
)
def test_every_kernel_is_found_without_a_gpu_and_travels_to_who_compiles_it(weights, least_names, tmp_path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.support.finding", weights]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    num_kernels, num_names, num_entries = map(int, done.stdout.split())
    assert num_kernels > 60
    assert num_names > least_names
    assert num_entries == 2
