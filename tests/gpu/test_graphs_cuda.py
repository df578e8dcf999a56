"""Decoding steps as CUDA graphs: the tokens of the same pieces run one by one, bit for bit, whatever the load."""

import pytest
import torch

from glm5.bench.steps.case import with_codes
from glm5.checkpoint.dummy import dummy
from glm5.config.presets import preset
from glm5.engine.llm import LLM
from glm5.engine.sampling import SamplingParams
from tests.support.models import random_model
from tests.support.running import Bench

pytestmark = pytest.mark.gpu

NUM_PROMPTS = 7


@pytest.fixture(scope="module", params=["bfloat16", "w4a8-channel"])
def model(request):
    if request.param == "bfloat16":
        return random_model(3, preset("nano"), torch.bfloat16).cuda()
    return dummy(with_codes(preset("nano"), request.param), fp8=True, device="cuda", seed=3)


def prompts_of(rng, count=NUM_PROMPTS, longest=150):
    return [[rng.randrange(700) for _ in range(rng.randint(1, longest))] for _ in range(count)]


KINDS = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"top_p": 0.8, "top_k": 30},
    {"presence_penalty": 0.5, "logprobs": 2},
    {"temperature": 0, "logprobs": 1},
    {"temperature": 0},
    {"temperature": 1.2},
]


@pytest.mark.parametrize("depth", [0, 2])
def test_graphs_and_pieces_give_the_same(model, rng, depth):
    prompts = prompts_of(rng)
    params = [SamplingParams(seed=i, max_tokens=24, **kind) for i, kind in enumerate(KINDS)]
    runs = []
    for captures in (False, True, True):
        bench = Bench(model, depth=depth, fused=True, routing=True)
        bench.runner.steps.graphs.captures = captures
        runs.append(bench.run(prompts, params, routed=True))
        greedy = bench.run(prompts[:3], SamplingParams(temperature=0, max_tokens=12))
        runs[-1].tokens |= {100 + i: tokens for i, tokens in greedy.tokens.items()}
    for other in runs[1:]:
        assert other.tokens == runs[0].tokens
        assert other.logprobs == runs[0].logprobs
        assert other.num_accepted == runs[0].num_accepted


def test_graphs_are_captured_anew_when_weights_move(model, rng):
    prompts = prompts_of(rng)
    bench = Bench(model, fused=True)
    params = SamplingParams(temperature=0, max_tokens=8)
    # Twice, as the cache has the prompts' pages from then on: fewer rows may take another kernel and round otherwise.
    want = [bench.run(prompts, params).tokens for _ in range(2)][-1]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    bench.runner.weights_changed()
    before = bench.runner.steps.graphs.num_captured
    assert bench.run(prompts, params).tokens == want
    assert bench.runner.steps.graphs.num_captured > before


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8", "num_speculative_tokens": 2}], ids=["plain", "fp8"])
def test_no_kernel_is_built_after_the_start(rng, caplog, options):
    """Prompts of many lengths, contexts beyond every reach, batches that grow and shrink, drafts."""
    cfg = preset("nano").model_copy(update={"max_position_embeddings": 1024})
    model = dummy(cfg, fp8=True, device="cuda")
    prompts = [[rng.randrange(700) for _ in range(rng.choice([3, 17, 40, 100, 900]))] for _ in range(20)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(20)]
    with LLM(model, max_num_seqs=4, max_num_batched_tokens=128, num_gpu_blocks_override=400, **options) as llm:
        print(dict(llm.table)["graphs"])
        llm.generate(prompts, params, use_tqdm=False)
        assert not [line for line in caplog.messages if "after the start" in line]
        assert llm.stats()["kernels_built_late"] == 0
