"""What the pipeline writes, run by this engine: logits of the fake-quantized model, for every scheme and target."""

import json
from pathlib import Path

import pytest
import torch

from glm5.checkpoint.formats import stored_of
from glm5.checkpoint.load import load
from glm5.checkpoint.names import slot_of
from glm5.checkpoint.save import save
from glm5.config.model import ModelConfig
from glm5.config.quantize import QuantizeConfig
from glm5.engine import LLM, SamplingParams
from glm5.kernels.quantized_weight import QuantizedWeight
from glm5.model.experts import QuantizedExperts
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.quantize.measure import Written
from glm5.quantize.run import quantize
from glm5.testing.numerics import rel_rms
from tests.support.models import random_model
from tests.support.quantized import fake_quantized
from tests.support.tokenizers import tiny_tokenizer
from tests.unit.quantize.conftest import small

# Scales are float32 in both; sums of groups and rows are float64. Measured 1e-8: a token's code flips nowhere.
BUDGET = 1e-6
ROTATED = """
[[process]]
type = "quarot"
[[process]]
type = "linear_quant"
include = ["model.layers.0.mlp.down_proj"]

qconfig.act = { scope = "per_token", dtype = "int8" }
qconfig.weight = { scope = "per_channel", dtype = "int8", method = "minmax" }
"""
CASES = {
    "w8a8": ("w8a8", "glm5"),
    "w4a8": ("w4a8", "glm5"),
    "w8a8 vllm": ("w8a8", "vllm"),
    "w4a8 vllm": ("w4a8", "vllm"),
    "w4a16 vllm": ("w4a16", "vllm"),
    "w4a8 sglang": ("w4a8", "sglang"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Quantized checkpoints of one model in float64, by scheme and target, made when asked for."""
    root = tmp_path_factory.mktemp("served")
    source = root / "source"
    save(random_model(3, small()), source, dtype="float64")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            scheme, target = CASES[name]
            settings = {"num_samples": 3, "sample_len": 24, "device": "cpu", "min_tokens": 2, "held_out_tokens": 0}
            settings["compute_dtype"] = "float64"
            config = {"model": str(source), "out": str(root / name.replace(" ", "-")), **settings}
            made[name] = quantize(QuantizeConfig.model_validate({**config, "scheme": scheme, "target": target}))
        return made[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_fake_quantized_model(written, name):
    path = written(name)
    model = load(path)
    ids = [[(7 * i + 3 * j) % 320 for j in range(20)] for i in range(2)]
    got, want = model.logits(ids), fake_quantized(path, torch.float64).logits(ids)
    assert got.dtype == torch.float64
    assert rel_rms(got, want) < BUDGET
    assert any(isinstance(module, QuantizedExperts) for module in model.modules())
    assert model.cfg.quantization_config == json.loads((path / "config.json").read_text())["quantization_config"]


def test_matrices_are_what_the_formats_read(written):
    """Dequantized from the file, and of the bytes that a model holds: every value, against the formats' own `read`."""
    for name in ("w8a8", "w4a8", "w4a8 vllm", "w4a8 sglang"):
        path = written(name)
        matrices, fetch = stored_of(ModelConfig.from_file(path)), Written(path).fetch
        quantized, held = load(path), load(path, dtype="bfloat16").state_dict()
        assert matrices
        for disk, matrix in matrices.items():
            slot = slot_of(disk)
            want = matrix.read(fetch).dequantize(torch.bfloat16)
            assert torch.equal(slot.view(held[slot.parameter]), want), (name, disk)
            owner = quantized.get_submodule(slot.module)
            weight, scale = (getattr(owner, slot.parameter.rpartition(".")[2] + end) for end in ("", "_scale"))
            got = QuantizedWeight(weight, scale, owner.format).dequantize(torch.bfloat16)
            assert torch.equal(slot.view(got), want), (name, disk)


@pytest.mark.parametrize("name", ["w4a8", "w4a8 vllm"])
def test_served(written, name):
    """By LLM, drafts and all: log probabilities of the fake-quantized model, token by token."""
    path = written(name)
    tiny_tokenizer().save(path)
    llm = LLM(
        path if name == "w4a8" else load(path),
        max_model_len=128,
        num_gpu_blocks_override=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    prompts = [[(7 * i + 3 * j) % 320 for j in range(9 + 5 * i)] for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    llm.close()
    want = fake_quantized(path, torch.float64)
    for prompt, output in zip(prompts, outputs, strict=True):
        made = output.outputs[0]
        logp = want.logits(prompt + list(made.token_ids)).log_softmax(-1)[len(prompt) - 1 : -1]
        assert list(made.token_ids) == logp.argmax(-1).tolist()
        got = [step[token].logprob for step, token in zip(made.logprobs, made.token_ids, strict=True)]
        assert max(abs(g - w) for g, w in zip(got, logp.amax(-1).tolist(), strict=True)) < 1e-5


def test_drafts_survive_the_rotation(tmp_path):
    """Of a residual stream that was turned, and weights at 8 bits: the MTP layer still says what it said before."""
    cfg = small()
    model = random_model(5, cfg).double()
    spread = torch.Generator().manual_seed(1)
    for norm in (model.model.norm, model.mtp.shared_head.norm):
        norm.weight.data = torch.rand(norm.weight.shape, generator=spread, dtype=torch.float64) + 0.5
    save(model, tmp_path / "source", dtype="float64")
    (tmp_path / "recipe.toml").write_text(ROTATED)
    config = {"model": str(tmp_path / "source"), "out": str(tmp_path / "out"), "recipe": str(tmp_path / "recipe.toml")}
    config |= {"device": "cpu", "compute_dtype": "float64", "held_out_tokens": 0, "target": "glm5"}
    turned = load(quantize(QuantizeConfig.model_validate(config)))
    # As many as the indexer keeps: no key is chosen otherwise where weights are a little different.
    ids = torch.arange(cfg.index_topk) * 7 % cfg.vocab_size

    def drafts(model: Glm5) -> list[torch.Tensor]:
        view = PackedView([len(ids)], model.device)
        with torch.inference_mode():
            hidden = model(ids, view)
            first, _ = model.draft(ids.roll(-1), hidden, view)
            second, _ = model.draft(ids.roll(-2), first, PackedView([len(ids)], model.device))
            return [model.head(h) for h in (hidden, first, second)]

    want, got = drafts(model), drafts(turned)
    errors = [rel_rms(g, w) for g, w in zip(got, want, strict=True)]
    assert max(errors) < 0.03, errors
    turned.mtp.chained_rotation.weight.copy_(torch.eye(cfg.hidden_size))
    assert rel_rms(drafts(turned)[1], want[1]) > 0.1
