"""Engines one after another, and beside each other, in one process: no capture of a graph ends for others' doing.

`python -m tests.gpu.test_engines_in_turn_cuda 200` starts as many as it is told, and says how it goes.
"""

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.llm import LLM
from glm5.engine.runner.graphs.captured import Graphs
from glm5.engine.sampling import SamplingParams
from tests.support.models import random_model

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 17, 42, 99], [7, 8, 9, 10, 11, 12], [3]]
DTYPES = (torch.bfloat16, torch.float32)


def models_of():
    return [random_model(i, preset(("tiny", "nano")[i % 2]), DTYPES[i // 2]).cuda() for i in range(4)]


def answers_of(model, **options):
    """Of an engine that is started for them, and then left to the garbage collector."""
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256, "num_gpu_blocks_override": 32}
    with LLM(model, **settings, **options) as llm:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def piece():
    """Makes enough containers for a collection, if there are any."""
    _ = [[i] for i in range(50)]
    return torch.ones(4, device="cuda") * 2


@pytest.fixture
def graphs():
    model = random_model(0, preset("tiny"), torch.bfloat16).cuda()
    with LLM(model, max_model_len=256, num_gpu_blocks_override=32) as llm:
        runner = llm.client.link.core.runner
        return Graphs(runner.passes, runner.cache, captures=True)


def leave_garbage():
    """A graph that only the garbage collector destroys."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        piece()
    cycle = [graph]
    cycle.append(cycle)


def test_a_graph_destroyed_during_a_capture_ends_it():
    """The control: what captures are kept from."""
    leave_garbage()
    with pytest.raises(torch.AcceleratorError, match="during capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        piece()
        gc.collect()


def test_closed_engines_are_not_collected_during_a_capture(graphs):
    thresholds = gc.get_threshold()
    leave_garbage()
    gc.set_threshold(1, 1, 1)
    try:
        graphs.capture("piece", piece, warm=False)
    finally:
        gc.set_threshold(*thresholds)
    graphs.run("piece", piece)


def test_another_thread_may_synchronize_the_device(graphs, caplog):
    attempts = []

    def disturbed():
        piece()
        attempts.append(None)
        if len(attempts) < 3:
            with ThreadPoolExecutor(1) as other, pytest.raises(torch.AcceleratorError):
                other.submit(torch.cuda.synchronize).result()

    graphs.capture("disturbed", disturbed, warm=False)
    assert len(attempts) == 3
    assert [line for line in caplog.messages if "another thread disturbed the capture" in line]
    graphs.run("disturbed", disturbed)
    torch.cuda.synchronize()


def test_engines_in_turn():
    models = models_of()
    alone = [answers_of(model) for model in models]
    assert [answers_of(models[i % 4]) for i in range(12)] == [alone[i % 4] for i in range(12)]


def test_engines_beside_each_other():
    models = models_of()
    alone = [answers_of(model) for model in models]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(answers_of, models * 3))
    assert found == alone * 3


def main(count: int) -> None:
    models, began = models_of(), time.monotonic()
    for i in range(1, count + 1):
        answers_of(models[i % 4], num_speculative_tokens=i // 4 % 3)
        if i % 20 == 0:
            seconds, mib = time.monotonic() - began, torch.cuda.memory_allocated() >> 20
            print(f"{i} engines, {seconds / i:.2f} s each, {mib} MiB allocated", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
