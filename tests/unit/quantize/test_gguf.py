"""GGUF files through the package `gguf`: its map of names, its reader, its dequantization."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from glm5.checkpoint.formats.gguf import Gguf
from glm5.checkpoint.gguf import file
from glm5.checkpoint.gguf.blocks import block_scale, pack, unpack
from glm5.checkpoint.gguf.file import create, entries
from glm5.checkpoint.gguf.metadata import add_config
from glm5.checkpoint.gguf.tensors import gguf_tensors, join_kv_b, plain_type, split_kv_b
from glm5.checkpoint.load import load
from glm5.common.errors import CheckpointError, ConfigError, MissingExtra
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.config.quantize import QuantizeConfig
from glm5.config.tensors import tensor_specs
from glm5.quant.minmax import minmax
from glm5.quant.minmax import quantize as encode
from glm5.quant.qat import int4
from glm5.quant.record import INT4_CHANNEL, INT8_CHANNEL, Grid
from glm5.quantize.measure import Written
from glm5.quantize.recipe import resolve
from glm5.quantize.run import quantize
from glm5.quantize.store import Store
from tests.support.checkpoints import edit_json, edit_tensors, read_tensors, snap
from tests.unit.quantize.conftest import small

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install 'glm5[gguf]'")

REPO = Path(__file__).parents[3]
AWARE = REPO / "recipes" / "w4a8-aware.toml"
BRIEF = {"num_samples": 3, "sample_len": 24, "device": "cpu", "min_tokens": 2, "held_out_tokens": 0}
# A layer as llama.cpp loads it: GGUF's name, its dimensions from the innermost out, its type. Sizes: conftest.small.
ATTENTION = {
    "attn_norm.weight": ([128], "F32"),
    "attn_q_a.weight": ([128, 128], "Q8_0"),
    "attn_q_a_norm.weight": ([128], "F32"),
    "attn_q_b.weight": ([128, 4 * 24], "Q8_0"),
    "attn_kv_a_mqa.weight": ([128, 32 + 8], "Q8_0"),
    "attn_kv_a_norm.weight": ([32], "F32"),
    "attn_k_b.weight": ([16, 32, 4], "BF16"),
    "attn_v_b.weight": ([32, 16, 4], "BF16"),
    "attn_output.weight": ([4 * 16, 128], "Q8_0"),
    "ffn_norm.weight": ([128], "F32"),
}
INDEXER = {
    "indexer.attn_q_b.weight": ([128, 16 * 16], "Q8_0"),
    "indexer.attn_k.weight": ([128, 16], "BF16"),
    "indexer.k_norm.weight": ([16], "F32"),
    "indexer.k_norm.bias": ([16], "F32"),
    "indexer.proj.weight": ([128, 16], "F32"),
}
DENSE = {
    f"ffn_{name}.weight": (shape, "Q8_0")
    for name, shape in [("gate", [128, 256]), ("up", [128, 256]), ("down", [256, 128])]
}
EXPERTS = {
    "ffn_gate_inp.weight": ([128, 8], "F32"),
    "exp_probs_b.bias": ([8], "F32"),
    **{f"ffn_{name}_exps.weight": ([128, 128, 8], "Q4_0") for name in ("gate", "up", "down")},
    **{f"ffn_{name}_shexp.weight": ([128, 128], "Q8_0") for name in ("gate", "up", "down")},
}
MTP = {
    "nextn.enorm.weight": ([128], "F32"),
    "nextn.hnorm.weight": ([128], "F32"),
    "nextn.eh_proj.weight": ([256, 128], "BF16"),
    "nextn.shared_head_norm.weight": ([128], "F32"),
}
PLAIN_MTP = {
    name: (shape, "BF16" if kind.startswith("Q") else kind)
    for name, (shape, kind) in (ATTENTION | INDEXER | EXPERTS).items()
}
LAYERS = [ATTENTION | INDEXER | DENSE, ATTENTION | INDEXER | EXPERTS, ATTENTION | EXPERTS, PLAIN_MTP | MTP]
OUTER = {
    "token_embd.weight": ([128, 320], "BF16"),
    "output_norm.weight": ([128], "F32"),
    "output.weight": ([128, 320], "BF16"),
}


def settings(model: Path, out: Path, **more: object) -> QuantizeConfig:
    return QuantizeConfig.model_validate({"model": str(model), "out": str(out), "target": "gguf", **BRIEF, **more})


@pytest.fixture(scope="module")
def aware(small_bf16, tmp_path_factory) -> Path:
    """A checkpoint of int4-aware training: the weights lie on the grid already. With a tokenizer and a template."""
    path = shutil.copytree(small_bf16, tmp_path_factory.mktemp("aware") / "model")
    edit_tensors(path, snap)
    edit_json(path / "config.json", quantization_aware={"bits": 4, "group_size": 128})
    return path


@pytest.fixture(scope="module")
def written(aware, tmp_path_factory) -> SimpleNamespace:
    """That checkpoint as GGUF, as the package reads it, and in glm5's own format."""
    folder = tmp_path_factory.mktemp("written")
    path = quantize(settings(aware, folder / "gguf", recipe=str(AWARE)))
    own = quantize(settings(aware, folder / "own", recipe=str(AWARE), target="glm5"))
    reader = gguf.GGUFReader(path / "model.gguf")
    return SimpleNamespace(
        path=path, own=own, reader=reader, by_name={tensor.name: tensor for tensor in reader.tensors}
    )


def values(tensor) -> torch.Tensor:
    """By the package's own function, in torch's order of dimensions."""
    found = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    return torch.from_numpy(found.copy()).reshape(*reversed(tensor.shape.tolist()))


def test_every_name_shape_and_type(written):
    wanted = OUTER | {f"blk.{i}.{name}": each for i, layer in enumerate(LAYERS) for name, each in layer.items()}
    found = {name: (tensor.shape.tolist(), tensor.tensor_type.name) for name, tensor in written.by_name.items()}
    assert found == wanted


def test_every_name_is_of_the_architecture(written):
    """By the package's list of tensors of GLM_DSA, and not by the map from Hugging Face's names."""
    of_architecture = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GLM_DSA]
    known = {gguf.TENSOR_NAMES[each].format(bid=i) for each in of_architecture for i in range(4)}
    assert {name.rpartition(".")[0] for name in written.by_name} <= known


def test_values_are_those_of_our_own_file(written, aware):
    """Bit for bit: int4 groups as in glm5's format, which are what training computed with; floats as in the source."""
    source, own = read_tensors(aware), Written(written.own)
    for i in (1, 2):
        for part in ("gate", "up", "down"):
            got = values(written.by_name[f"blk.{i}.ffn_{part}_exps.weight"])
            for expert in range(8):
                module = f"model.layers.{i}.mlp.experts.{expert}.{part}_proj"
                codes, scale = own.fetch(f"{module}.weight"), own.fetch(f"{module}.weight_scale")
                pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(1).to(torch.int8)
                meant = (torch.where(pairs > 7, pairs - 16, pairs) * scale).float()
                assert torch.equal(got[expert], meant)
                assert torch.equal(got[expert].bfloat16(), source[f"{module}.weight"])
    plain = {"token_embd": "model.embed_tokens", "output": "lm_head", "blk.3.nextn.eh_proj": "model.layers.3.eh_proj"}
    plain |= {
        "blk.1.ffn_gate_inp": "model.layers.1.mlp.gate",
        "blk.1.indexer.proj": "model.layers.1.self_attn.indexer.weights_proj",
    }
    for name, of in plain.items():
        assert torch.equal(values(written.by_name[f"{name}.weight"]), source[f"{of}.weight"].float())
    bias = values(written.by_name["blk.2.exp_probs_b.bias"])
    assert torch.equal(bias, source["model.layers.2.mlp.gate.e_score_correction_bias"])
    stack = values(written.by_name["blk.3.ffn_up_exps.weight"])
    assert all(
        torch.equal(stack[e], source[f"model.layers.3.mlp.experts.{e}.up_proj.weight"].float()) for e in range(8)
    )


def test_int8_is_written_as_it_was_computed_and_close_to_float32_scales(written, aware):
    """Scales in float16 cost next to nothing beside int8 itself."""
    source, own = read_tensors(aware), Written(written.own)
    module = "model.layers.0.self_attn.q_b_proj"
    got, meant = values(written.by_name["blk.0.attn_q_b.weight"]), source[f"{module}.weight"].float()
    scale = (meant.abs().amax(1, keepdim=True) / 127).half().float()
    assert torch.equal(got, (meant / scale).round() * scale)
    finer = own.fetch(f"{module}.weight").float() * own.fetch(f"{module}.weight_scale")
    assert (got - meant).norm() < 1.01 * (finer - meant).norm()


def test_kv_b_is_split_as_absorbed_attention_reads_it(written, aware):
    """q_nope . k = (k_b^T q_nope) . latent, for every head, and v = v_b latent."""
    kv_b = read_tensors(aware)["model.layers.1.self_attn.kv_b_proj.weight"].double().unflatten(0, (4, 32))
    k_b, v_b = (values(written.by_name[f"blk.1.attn_{half}.weight"]).double() for half in ("k_b", "v_b"))
    rng = torch.Generator().manual_seed(0)
    latent, query = (
        torch.randn(32, dtype=torch.float64, generator=rng),
        torch.randn(4, 16, dtype=torch.float64, generator=rng),
    )
    keys, outputs = (kv_b @ latent).split([16, 16], 1)
    torch.testing.assert_close((k_b @ query.unsqueeze(-1)).squeeze(-1) @ latent, (query * keys).sum(-1))
    torch.testing.assert_close(v_b @ latent, outputs)
    halves = split_kv_b(small(), "x.kv_b_proj.weight", kv_b.flatten(0, 1))
    assert torch.equal(join_kv_b("x.kv_b_proj.weight", halves.__getitem__), kv_b.flatten(0, 1))


@pytest.mark.parametrize(
    "grid", [INT4_CHANNEL, INT8_CHANNEL, Grid("int", 4, "group", 32), Grid("int", 8, "group", 64)], ids=str
)
def test_blocks_are_those_of_the_package(grid):
    """The package dequantizes them to the same values, and they are read back as they were."""
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    scale, _ = minmax(weight, grid)
    weight_codes = encode(weight, grid, block_scale(scale), None)
    packed = pack(weight_codes)
    kind = gguf.GGMLQuantizationType["Q4_0" if grid.bits == 4 else "Q8_0"]
    assert torch.equal(torch.from_numpy(gguf.dequantize(packed.numpy(), kind)), weight_codes.dequantize(torch.float32))
    back = unpack(packed, grid)
    assert torch.equal(back.codes, weight_codes.codes)
    assert torch.equal(back.scale, weight_codes.scale)


def test_a_group_has_one_scale_in_all_of_its_blocks():
    packed = pack(int4(torch.randn(2, 128, generator=torch.Generator().manual_seed(2))))
    packed[1, 18] ^= 1  # the scale of a row's second block
    with pytest.raises(CheckpointError, match="blocks of one group have several scales"):
        unpack(packed, Grid("int", 4, "group", 128))


def test_every_scale_of_int4_aware_training_is_a_float16_number():
    """All bfloat16 numbers from 1e-5, the least scale of training, to the largest that float16 holds."""
    every = torch.arange(0x0001, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    scales = every[(every >= torch.tensor(1e-5).bfloat16()) & (every <= 65504)]
    assert len(scales) > 4000
    assert torch.equal(block_scale(scales), scales)
    assert not torch.equal(block_scale(scales / 4), scales / 4)  # the control: smaller ones lose bits


def test_scales_beyond_float16_are_refused():
    with pytest.raises(ConfigError, match=r"a scale of 7e\+04 is beyond 65504"):
        Gguf().stored_scale(torch.tensor([[7e4]]), None)  # type: ignore[arg-type]


def test_a_run_that_is_cut_off_goes_on_to_the_same_bytes(aware, written, tmp_path, monkeypatch):
    class Cut(Exception):
        pass

    done = Store.done

    def cut(self, layer_idx, *args):
        done(self, layer_idx, *args)
        if layer_idx == 1:
            raise Cut

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(Store, "done", cut)
        quantize(settings(aware, tmp_path / "out", recipe=str(AWARE)))
    path = quantize(settings(aware, tmp_path / "out", recipe=str(AWARE)))
    assert (path / "model.gguf").read_bytes() == (written.path / "model.gguf").read_bytes()


def test_a_file_that_reads_back_otherwise_is_not_published(aware, tmp_path, monkeypatch):
    """The verification reads the GGUF itself."""
    fill = file.fill

    def lossy(path, where, tensors):
        lost = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if "up_proj" in name}
        fill(path, where, {**tensors, **lost})

    monkeypatch.setattr(file, "fill", lossy)
    with pytest.raises(CheckpointError, match="up_proj reads back unlike it was written"):
        quantize(settings(aware, tmp_path / "out", recipe=str(AWARE)))
    assert not (tmp_path / "out").exists()


def test_the_measurement_reads_the_gguf(aware, tmp_path):
    """With w4a16 all of the model is as before: int4-aware weights up to their rounding to bfloat16."""
    path = quantize(settings(aware, tmp_path / "out", method="minmax", held_out_tokens=32))
    report = json.loads((path / "quantization.json").read_text())
    assert report["quality"]["kl"] < 1e-4
    assert report["parts"]["experts"]["bits"] == 4.5
    assert "for drafts" not in report["parts"]


def test_rotation_leaves_the_residual_stream_or_mtp_out(aware, small_bf16, tmp_path):
    resolved = resolve(settings(small_bf16, tmp_path / "kept", scheme="w4a8"))
    assert resolved.recipe.rotation is not None
    assert not resolved.recipe.rotation.residual
    assert "gguf has no place for what MTP would need" in resolved.notes[0]
    assert "llama.cpp rounds inputs in its own way" in resolved.notes[1]
    path = quantize(settings(aware, tmp_path / "dropped", method="minmax", mtp="drop"))
    reader = gguf.GGUFReader(path / "model.gguf")
    assert reader.get_field("glm-dsa.nextn_predict_layers").contents() == 0
    assert reader.get_field("glm-dsa.block_count").contents() == 3
    assert not [tensor.name for tensor in reader.tensors if tensor.name.startswith("blk.3.")]


def test_keys(written):
    """What llama.cpp's converter writes for this architecture."""
    keys = {
        name.removeprefix("glm-dsa."): field.contents()
        for name, field in written.reader.fields.items()
        if name.startswith("glm-dsa.")
    }
    assert keys == {
        "block_count": 4,
        "context_length": 1024,
        "embedding_length": 128,
        "vocab_size": 320,
        "feed_forward_length": 256,
        "leading_dense_block_count": 1,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 128,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 40,
        "attention.value_length": 32,
        "attention.key_length_mla": 24,
        "attention.value_length_mla": 16,
        "rope.dimension_count": 8,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 128,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "nextn_predict_layers": 1,
        "attention.indexer.head_count": 16,
        "attention.indexer.key_length": 16,
        "attention.indexer.top_k": 8,
        "attention.indexer.types": [True, True, False],
    }
    general = {
        name: written.reader.get_field(f"general.{name}").contents()
        for name in ("architecture", "type", "file_type", "quantization_version")
    }
    assert general == {"architecture": "glm-dsa", "type": "model", "file_type": 2, "quantization_version": 2}
    assert written.reader.get_field("tokenizer.ggml.model").contents() == "none"


def test_what_gguf_has_no_place_for_is_refused_by_name(small_bf16, tmp_path, monkeypatch):
    def refused(words: str, **changes: object) -> None:
        with pytest.raises(ConfigError, match=words):
            quantize(settings(small_bf16, tmp_path / "out", **changes))
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".*"))

    refused("mlp.down_proj as fp8-block: GGUF's Q4_0 and Q8_0 hold symmetric int4 and int8", scheme="fp8")
    refused("as nvfp4: GGUF's Q4_0 and Q8_0 hold", scheme="nvfp4")
    refused("w4a8 for gguf has int4 per channel", w4a8_weights="group")
    step = '[[process]]\ntype = "linear_quant"\ninclude = ["{}"]\nqconfig.weight = {}\n'
    recipe = tmp_path / "recipe.toml"
    for pattern, weight, words in [
        (
            "*kv_b_proj",
            '{ scope = "per_channel", dtype = "int8" }',
            "kv_b_proj as w8a16: GGUF holds the keys' half transposed",
        ),
        (
            "*o_proj",
            '{ scope = "per_group", dtype = "int4", ext = { group_size = 16 } }',
            "GGUF has blocks of 32 in a row",
        ),
        ("*o_proj", '{ scope = "per_channel", dtype = "int4", symmetric = false }', "not w4a16-asymmetric"),
    ]:
        recipe.write_text(step.format(pattern, weight))
        refused(words, recipe=str(recipe))
    odd = small().replace(moe_intermediate_size=144)
    with pytest.raises(
        ConfigError,
        match=r"rows of 144 of model.layers.1.mlp.experts.0.down_proj.weight do not divide into blocks of 32",
    ):
        Gguf().check(odd, tmp_path, {1: {"mlp.experts.*.down_proj": SimpleNamespace()}})  # type: ignore[dict-item]
    mixed = ModelConfig.from_dict(small().to_dict() | {"mlp_layer_types": ["dense", "sparse", "dense"]})
    for cfg, words in [
        (mixed, "a dense layer behind layer 1"),
        (small().replace(value_head=True), "value_head: GGUF has no tensor"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Gguf().check(cfg, tmp_path, {})
    with pytest.raises(CheckpointError, match=r"x is torch\.float64; GGUF takes torch\.float32"):
        plain_type("x", torch.float64, 2)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"pip install 'glm5\[gguf\]'"):
        quantize(settings(small_bf16, tmp_path / "out"))


def test_this_engine_says_that_it_is_llama_cpps(written):
    with pytest.raises(CheckpointError, match=r"holds a GGUF, which llama\.cpp loads; for this engine: glm5 quantize"):
        load(written.path)


def test_damaged_files_are_named(written, tmp_path):
    content = (written.path / "model.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    for damaged in (b"", b"GGML" + content[4:], content[:5000], content[:-4000]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
            entries(path, small())
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"attn_q_b.weight is Q8_0 \[96, 128\], not \[120, 128\] in"):
        entries(path, small().replace(qk_nope_head_dim=22))


def test_the_full_model_is_laid_out_without_its_weights(tmp_path):
    """Layers of GLM-5's sizes and the MTP layer, in a file that is a hole."""
    cfg = preset("glm-5").replace(num_hidden_layers=5)
    tensors = gguf_tensors(cfg)
    path = tmp_path / "model.gguf"
    types = dict.fromkeys(tensors, "BF16") | {each: "Q4_0" for each in tensors if "_exps" in each.name}
    create(path, types, lambda writer: add_config(writer, cfg))
    found = entries(path, cfg)
    assert path.stat().st_size > 18e9
    assert path.stat().st_blocks * 512 < 1e6
    names = {spec.name for spec in tensor_specs(cfg)}
    assert names - found.keys() == {name for name in names if name.endswith("kv_b_proj.weight")}
    last = found["model.layers.5.mlp.experts.255.down_proj.weight"]
    assert last.shape == (6144, 2048 // 32 * 18)
