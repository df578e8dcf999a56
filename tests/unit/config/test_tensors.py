"""The inventory of tensors counts what the published checkpoints count."""

from collections import Counter
from math import ceil, prod

import pytest

from glm5.config.presets import PRESET_NAMES, preset
from glm5.config.tensors import count_bytes, count_parameters, tensor_specs


@pytest.mark.parametrize(
    ("name", "total", "with_mtp", "active"),
    [
        ("glm-5", 743_911_199_232, 753_864_119_552, 39_881_544_192),
        ("glm-5.2", 743_377_000_704, 753_329_921_024, 39_347_345_664),
    ],
)
def test_published_counts(name, total, with_mtp, active):
    count = count_parameters(preset(name))
    assert (count.total, count.with_mtp, count.biases) == (total, with_mtp, 19_456)
    assert count.active == active  # the report: 40B active
    assert sum(count.by_part.values()) == with_mtp


def test_published_bytes_of_glm_5_2_fp8():
    num_bytes = count_bytes(preset("glm-5.2"), fp8=True)
    assert num_bytes.total() == 755_617_140_416
    assert sum(n for (dtype, _), n in num_bytes.items() if dtype == "F8_E4M3") == 751_226_191_872


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_counting_and_listing_agree(name):
    cfg = preset(name)
    specs = tensor_specs(cfg)
    assert len({spec.name for spec in specs}) == len(specs)
    by_part = Counter[str]()
    for spec in specs:
        by_part[spec.part] += prod(spec.shape) if spec.dtype == "bf16" else 0
    count = count_parameters(cfg)
    assert by_part == Counter(count.by_part)
    assert sum(prod(spec.shape) for spec in specs if spec.dtype == "f32") == count.biases
    assert sum(prod(spec.shape) for spec in tensor_specs(cfg, mtp=False) if spec.dtype == "bf16") == count.total
    assert count_bytes(cfg, fp8=False).total() == 2 * count.with_mtp + 4 * count.biases
    scales = sum(4 * prod(ceil(dim / 128) for dim in spec.shape) for spec in specs if spec.fp8)
    saved = sum(prod(spec.shape) for spec in specs if spec.fp8)
    assert count_bytes(cfg, fp8=True).total() == count_bytes(cfg, fp8=False).total() - saved + scales


def test_names_and_shapes_of_glm_5_2():
    specs = {spec.name: spec for spec in tensor_specs(preset("glm-5.2"))}
    shapes = {
        "model.embed_tokens.weight": (154880, 6144),
        "model.layers.0.self_attn.q_b_proj.weight": (16384, 2048),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (576, 6144),
        "model.layers.0.self_attn.kv_b_proj.weight": (28672, 512),
        "model.layers.0.self_attn.o_proj.weight": (6144, 16384),
        "model.layers.6.self_attn.indexer.wq_b.weight": (4096, 2048),
        "model.layers.6.self_attn.indexer.weights_proj.weight": (32, 6144),
        "model.layers.2.mlp.down_proj.weight": (6144, 12288),
        "model.layers.3.mlp.gate.e_score_correction_bias": (256,),
        "model.layers.77.mlp.experts.255.down_proj.weight": (6144, 2048),
        "model.layers.78.mlp.shared_experts.up_proj.weight": (2048, 6144),
        "model.layers.78.self_attn.indexer.k_norm.bias": (128,),
        "model.layers.78.eh_proj.weight": (6144, 12288),
        "model.layers.78.shared_head.norm.weight": (6144,),
    }
    assert {name: specs[name].shape for name in shapes} == shapes
    assert "model.layers.3.self_attn.indexer.wk.weight" not in specs  # layer 3 shares
    assert "model.layers.78.embed_tokens.weight" not in specs
    assert specs["model.layers.78.mlp.gate.e_score_correction_bias"].dtype == "f32"
    never_fp8 = ("norm", "weights_proj", "mlp.gate.", "eh_proj", "embed_tokens", "lm_head")
    assert all(spec.fp8 != any(word in name for word in never_fp8) for name, spec in specs.items())


def test_a_model_without_mtp_has_no_mtp_tensors():
    cfg = preset("tiny").replace(num_nextn_predict_layers=0)
    count = count_parameters(cfg)
    assert count.total == count.with_mtp
    assert tensor_specs(cfg) == tensor_specs(preset("tiny"), mtp=False)
    assert count.biases == preset("tiny").n_routed_experts * 3
