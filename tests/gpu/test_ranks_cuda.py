"""Two GPUs that share a model: collectives to the bit, and the answers of one GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm5.checkpoint.init import write_random
from glm5.config.presets import preset
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SIZES = {"max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 100, "watchdog_timeout": 120.0}
BUDGET = {"float32": 2e-2, "bfloat16": 0.25}  # of log-probabilities near -6; a wrong part of a sum gives more than 1
SECONDS = 300


def test_collectives():
    """Checked against float64, twenty times alike, on every rank alike; then timed."""
    command = [sys.executable, "-m", "glm5.bench.kernels.collectives", "--ranks", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=SECONDS, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_one_gpu(tmp_path, dtype):
    path = tmp_path / "nano"
    write_random(preset("nano"), path, seed=0, dtype=dtype)
    gen = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 500, (n,), generator=gen).tolist() for n in (3, 70, 150)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    found = []
    for size in (1, 2, 2):
        with LLM(str(path), tensor_parallel_size=size, device="cuda", **SIZES) as llm:
            found.append(llm.generate(prompts, params, use_tqdm=False))
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            if dtype == "float32":
                assert got.outputs[0].token_ids == want.outputs[0].token_ids
            for mine, known in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
                assert all(abs(mine[token].logprob - known[token].logprob) < BUDGET[dtype] for token in known)
    first, again = ([output.outputs[0].token_ids for output in one] for one in found[1:])
    assert first == again
