"""The reference path on one GPU: a checkpoint gives the CPU's numbers there, kept FP8 and cached decode included."""

import pytest
import torch

import glm5
from glm5.checkpoint.init import write_random
from glm5.checkpoint.save import save
from glm5.config.presets import preset
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.kernels.block_scaled import BlockScaled, quantize_blocks
from glm5.kernels.fp8_linear import fp8_linear

pytestmark = pytest.mark.gpu

FLOAT32 = 1e-4  # max abs difference of logits of unit scale: the same sums in another order, 1e-5 measured
LENGTH = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "tiny"
    write_random(preset("tiny"), out, seed=0, dtype="float32")
    return out


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(2, 300, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()


def test_logits_equal_the_cpu(checkpoint, ids):
    want = glm5.load(checkpoint).logits(ids)
    got = glm5.load(checkpoint, device="cuda").logits(ids).cpu()
    assert (got - want).abs().max() < FLOAT32


def test_cached_decode_equals_one_pass(checkpoint, ids):
    """Greedy tokens of a batch on the GPU are those of the CPU, from checkpoints loaded by the engine."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [ids[:5], ids[:37], ids]
    tokens = [
        [out.outputs[0].token_ids for out in LLM(checkpoint, device=device).generate(prompts, params, use_tqdm=False)]
        for device in ("cpu", "cuda")
    ]
    assert tokens[0] == tokens[1]


def test_seeded_sampling_equals_the_cpu(checkpoint, ids):
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
    tokens = [
        LLM(checkpoint, device=device).generate(ids, params, use_tqdm=False)[0].outputs[0].token_ids
        for device in ("cpu", "cuda")
    ]
    assert tokens[0] == tokens[1]


def test_fp8_kept_and_dequantized(checkpoint, ids, tmp_path):
    save(glm5.load(checkpoint), tmp_path / "fp8", dtype="fp8")
    want = glm5.load(tmp_path / "fp8", dtype="float32").logits(ids)
    dequantized = glm5.load(tmp_path / "fp8", dtype="float32", device="cuda").logits(ids).cpu()
    assert (dequantized - want).abs().max() < FLOAT32
    kept = glm5.load(tmp_path / "fp8", device="cuda")
    assert kept.model.layers[0].self_attn.o_proj.weight.dtype == torch.float8_e4m3fn
    assert kept.logits(ids).isfinite().all()


def test_fp8_linear_is_bitwise_the_cpu():
    """Whole models with FP8 activations are not comparable: one rounding flips a key. The op itself is exact."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(33, 300, generator=gen).bfloat16()
    weight = quantize_blocks(torch.randn(200, 300, generator=gen))
    on_gpu = fp8_linear(x.cuda(), BlockScaled(weight.data.cuda(), weight.scale.cuda()), impl="reference")
    assert torch.equal(on_gpu.cpu(), fp8_linear(x, weight))


def test_bfloat16_runs(checkpoint, ids):
    logits = glm5.load(checkpoint, dtype="bfloat16", device="cuda").logits([ids, ids])
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
