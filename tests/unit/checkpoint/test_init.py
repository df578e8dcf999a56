"""Random checkpoints: the same for a seed, sane activations, and complete enough to be served."""

import pytest
import torch

from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.init import RandomTensors, write_random, write_weightless
from glm5.checkpoint.inspect import inspect
from glm5.checkpoint.load import load
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.router import router
from tests.support.checkpoints import read_tensors, shard_files


def test_seed_decides_and_order_and_shards_do_not(tmp_path):
    cfg = preset("tiny")
    first = read_tensors(write_random(cfg, tmp_path / "a", seed=1))
    again = read_tensors(write_random(cfg, tmp_path / "b", seed=1, max_shard_bytes=50_000))
    other = read_tensors(write_random(cfg, tmp_path / "c", seed=2))
    fewer = read_tensors(
        write_random(cfg.replace(num_hidden_layers=2, index_topk_pattern="FF"), tmp_path / "d", seed=1)
    )
    assert len(shard_files(tmp_path / "b")) > 10
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(first["model.layers.1.mlp.gate.weight"], fewer["model.layers.1.mlp.gate.weight"])
    matrices = [first[name].flatten()[:8].tolist() for name in first if first[name].dim() == 2]
    assert len(matrices) == len({tuple(values) for values in matrices})


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_it_loads(tmp_path, dtype, expected):
    report = inspect(write_random(preset("tiny"), tmp_path / "out", seed=3, dtype=dtype))
    assert report.loads
    model = load(tmp_path / "out")
    assert model.dtype == expected
    assert model.logits([[1, 2, 3], [4, 5, 6]]).isfinite().all()


@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_activations_are_sane_and_the_router_spreads(tmp_path, name, seed):
    cfg = preset(name)
    model = load(write_random(cfg, tmp_path / "out", seed=4, dtype="float32"))
    ids = torch.randint(cfg.vocab_size, (512,), generator=torch.Generator().manual_seed(seed))
    assert 0.3 < model.logits(ids).std() < 3
    gate = model.model.layers[cfg.num_hidden_layers - 1].mlp.gate
    x_TD = torch.randn(512, cfg.hidden_size, generator=torch.Generator().manual_seed(seed))
    _, expert_TA = router(
        x_TD,
        gate.weight,
        gate.e_score_correction_bias,
        top_k=cfg.num_experts_per_tok,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        scaling_factor=1.0,
    )
    share = expert_TA.flatten().bincount(minlength=cfg.n_routed_experts) / expert_TA.numel()
    assert share.min() > 0.25 / cfg.n_routed_experts
    assert share.max() < 4 / cfg.n_routed_experts


def test_full_size_tensors_have_unit_gain(seed):
    specs = {spec.name: spec for spec in tensor_specs(preset("glm-5"))}
    spec, random_tensors = specs["model.layers.3.mlp.experts.200.gate_proj.weight"], RandomTensors(seed)
    weight = random_tensors.values(spec, torch.float32)
    assert tuple(weight.shape) == (2048, 6144)
    assert abs(weight.std() * 6144**0.5 - 1) < 0.01  # standard error 0.0004
    weight = BlockScaled(*random_tensors.blocks(spec)).dequantize(torch.float32)
    assert abs(weight.std() * 6144**0.5 - 1) < 0.25


def test_large_tensors_are_drawn_once_and_no_slice_of_one_is_like_another(seed):
    """Widths that are powers of two above all: what a rank reads at a wrong place must differ."""
    specs = [spec for spec in tensor_specs(preset("glm-5")) if spec.name.startswith("model.layers.3.mlp.experts.20")]
    random_tensors, corners = RandomTensors(seed), set[bytes]()
    for spec in specs[:6]:
        codes = random_tensors.blocks(spec)[0].view(torch.uint8)
        assert ((codes & 0x7F) != 0x7F).all()
        for lines in (codes, codes.T):
            assert len({line[:16].numpy().tobytes() for line in lines}) == len(lines)
        corners.add(codes[:2, :16].numpy().tobytes())
    assert len(corners) == 6
    again = RandomTensors(seed).blocks(specs[5])[0].view(torch.uint8)
    assert torch.equal(again, codes)  # whatever else was drawn


def test_large_tensors_take_no_memory_of_their_own(seed):
    embedding = next(spec for spec in tensor_specs(preset("glm-5")) if spec.part == "embedding")
    values = RandomTensors(seed).values(embedding, torch.bfloat16)
    assert values.shape == embedding.shape
    assert values.untyped_storage().nbytes() < values.nbytes / 100
    assert values[:1000].float().std() == pytest.approx(1, rel=0.05)


def test_a_tokenizer_comes_along_and_config_names_its_ends(tmp_path):
    tokenizer = Tokenizer.from_dir(write_random(preset("tiny"), tmp_path / "out", seed=5))
    assert tokenizer.vocab_size <= preset("tiny").vocab_size
    assert tokenizer.decode(tokenizer.encode("Hello, wörld!")) == "Hello, wörld!"
    cfg = load(tmp_path / "out").cfg
    assert cfg.eos_token_id == tokenizer.eos_ids
    assert cfg.pad_token_id == tokenizer.id_of("<|endoftext|>")
    assert len(cfg.eos_token_id) == 3


def test_a_vocabulary_too_small_for_a_tokenizer(tmp_path, caplog):
    out = write_random(preset("tiny").replace(vocab_size=97), tmp_path / "out", seed=6)
    assert "no tokenizer is written: vocab_size 97 is too small" in caplog.text
    assert not (out / "tokenizer.json").exists()
    assert load(out).logits([1, 2]).shape == (2, 97)


def test_dtype_must_be_known(tmp_path):
    with pytest.raises(ConfigError, match="dtype: got fp8; allowed: bfloat16"):
        write_random(preset("tiny"), tmp_path / "out", seed=7, dtype="fp8")
    assert not (tmp_path / "out").exists()


def test_fp8_weights_are_written_with_their_scales_and_load(tmp_path):
    cfg = preset("nano", 2)
    write_random(cfg, tmp_path / "fp8", seed=3, fp8=True)
    model = load(tmp_path / "fp8")
    assert model.cfg.num_hidden_layers == 2
    assert model.cfg.quantization_config is not None
    weight = model.model.layers[0].mlp.down_proj.dense(torch.float32)
    # Few blocks, each with a scale of its own.
    assert weight.std() * cfg.intermediate_size**0.5 == pytest.approx(1, rel=0.5)
    assert model.logits([1, 2, 3]).isfinite().all()


def test_a_folder_without_weights_serves_for_dummy_ones(tmp_path):
    write_weightless(preset("nano", 2), tmp_path / "none")
    assert not list((tmp_path / "none").glob("*.safetensors"))
    assert Tokenizer.from_dir(tmp_path / "none").eos_ids
    assert ModelConfig.from_file(tmp_path / "none").quantization_config is not None


def test_more_layers_than_there_are_cannot_be_had():
    with pytest.raises(ConfigError, match="num_hidden_layers: got 9; allowed: 1 to 3"):
        preset("nano", 9)
