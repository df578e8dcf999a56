"""The engine on one GPU: the CPU's tokens, whatever the step; deterministic mode to the bit; tiers and sleep."""

import pytest
import torch

from glm5.checkpoint.init import write_random
from glm5.config.presets import preset
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams

pytestmark = pytest.mark.gpu

NUM_PROMPTS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "nano"
    write_random(preset("nano"), out, seed=0, dtype="float32")
    return out


@pytest.fixture(scope="module")
def fp8_checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "fp8"
    write_random(preset("nano"), out, seed=0, fp8=True)
    return out


@pytest.fixture(scope="module")
def prompts():
    gen = torch.Generator().manual_seed(0)
    return [torch.randint(2, 500, (int(n),), generator=gen).tolist() for n in torch.randint(3, 200, (NUM_PROMPTS,))]


@pytest.fixture(scope="module")
def params():
    common = {"max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    return [
        SamplingParams(temperature=0, **common) if i % 2 else SamplingParams(seed=i, top_p=0.9, **common)
        for i in range(NUM_PROMPTS)
    ]


def answers(checkpoint, prompts, params, **options):
    with LLM(checkpoint, **{"max_model_len": 512, "num_gpu_blocks_override": 200} | options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [out.outputs[0] for out in outputs]


def tokens(outputs):
    return [list(out.token_ids) for out in outputs]


def bits(outputs):
    return [[(i, next(iter(entry.values())).logprob) for i, entry in enumerate(out.logprobs)] for out in outputs]


@pytest.mark.parametrize(
    "options", [{"num_speculative_tokens": 0, "async_scheduling": False}, {}], ids=["plain", "mtp"]
)
def test_tokens_are_the_cpus(checkpoint, prompts, params, options):
    want = answers(checkpoint, prompts, params, device="cpu", num_speculative_tokens=0)
    assert tokens(answers(checkpoint, prompts, params, device="cuda", **options)) == tokens(want)


@pytest.mark.parametrize("weights", ["float32", "fp8"])
def test_deterministic_to_the_bit(weights, checkpoint, fp8_checkpoint, prompts, params):
    checkpoint = fp8_checkpoint if weights == "fp8" else checkpoint
    first = answers(checkpoint, prompts, params, device="cuda", deterministic=True, num_speculative_tokens=0)
    for options in ({"max_num_seqs": 1}, {"num_speculative_tokens": 3}, {"long_prefill_token_threshold": 7}):
        again = answers(checkpoint, prompts, params, device="cuda", deterministic=True, **options)
        assert tokens(again) == tokens(first), options
        assert bits(again) == bits(first), options


def test_tiers_give_back_what_they_took(checkpoint, prompts, params, tmp_path):
    want = answers(checkpoint, prompts, params, device="cuda", deterministic=True)
    tiers = {"kv_offloading_size": 0.05, "kv_disk_dir": str(tmp_path), "num_gpu_blocks_override": 12}
    for _ in range(2):  # the second process finds the first one's pages
        got = answers(checkpoint, prompts, params, device="cuda", deterministic=True, **tiers)
        assert bits(got) == bits(want)


def test_sleep_gives_memory_back(checkpoint, prompts, params):
    with LLM(checkpoint, device="cuda", max_model_len=512, num_gpu_blocks_override=20000) as llm:
        want = tokens([out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)])
        free, _ = torch.cuda.mem_get_info()
        said = llm.sleep(1)
        gained = torch.cuda.mem_get_info()[0] - free
        print(f"said {said}, gained {gained}")
        assert gained > 0.95 * said
        llm.wake_up()
        assert tokens([out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]) == want
