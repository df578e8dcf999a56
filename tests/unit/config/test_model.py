"""ModelConfig reads the family's config.json files and their re-exports, and writes what others read alike."""

import json

import pytest

from glm5.config.model import ModelConfig
from glm5.config.presets import PRESET_NAMES, preset

# As published, in the spelling of the files (the sizes are those of the GLM-5 preset).
GLM_5 = {
    **{key: preset("glm-5").to_dict()[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")},
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.2.dev0",
    "use_cache": True,
    "v_head_dim": 256,
}
FULL_LAYERS_5_2 = [0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74]
TYPES_5_2 = ["full" if i in FULL_LAYERS_5_2 else "shared" for i in range(78)]
GLM_5_2 = {
    **GLM_5,
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": TYPES_5_2,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "moe_router_dtype": "float32",
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}
TINY = preset("tiny").to_dict()
NO_SHARING = {key: value for key, value in TINY.items() if key not in ("indexer_types", "index_topk_pattern")}


def full_layers(cfg: ModelConfig) -> list[int]:
    return [i for i, kind in enumerate(cfg.indexer_types) if kind == "full"]


def test_glm_5_as_published_is_the_preset():
    cfg = ModelConfig.from_dict(GLM_5)
    assert cfg.to_dict() == {**preset("glm-5").to_dict(), **cfg.unused}
    assert cfg.unused == {"use_cache": True, "pretraining_tp": 1, "ep_size": 1, "transformers_version": "5.0.2.dev0"}
    assert cfg.extra == {}
    assert cfg.rope_theta == 1e6
    assert cfg.qk_head_dim == 256
    assert full_layers(cfg) == list(range(78))


def test_glm_5_2_as_published_is_the_preset():
    cfg = ModelConfig.from_dict(GLM_5_2)
    assert cfg.to_dict() == {**preset("glm-5.2").to_dict(), **cfg.unused}
    assert cfg.extra == {}
    assert full_layers(cfg) == FULL_LAYERS_5_2
    assert cfg.rope_theta == 8e6
    assert cfg.qk_rope_head_dim == 64  # head_dim says 192
    assert (cfg.has_indexer(78), cfg.is_moe(78), cfg.num_layers_with_mtp) == (True, True, 79)


def test_each_way_to_state_sharing_gives_glm_5_2():
    plain = {
        k: v for k, v in GLM_5_2.items() if k not in ("indexer_types", "index_topk_freq", "index_skip_topk_offset")
    }
    letters = "".join(kind[0].upper() for kind in TYPES_5_2)
    for stated in (
        {"indexer_types": TYPES_5_2},
        {"index_topk_pattern": letters},
        {"index_topk_pattern": list(letters)},
        {"index_topk_pattern": TYPES_5_2},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    ):
        assert full_layers(ModelConfig.from_dict({**plain, **stated})) == FULL_LAYERS_5_2


@pytest.mark.parametrize(
    ("stated", "full"),
    [
        ({}, [0, 1, 2, 3]),
        ({"index_topk_freq": None, "index_topk_pattern": None, "index_skip_topk_offset": None}, [0, 1, 2, 3]),
        ({"index_topk_freq": 2}, [0, 1, 3]),  # the offset is 2 when absent
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2]),
        ({"index_topk_pattern": "FSSS", "index_topk_freq": 1}, [0]),
        ({"indexer_types": ["full", "full", "shared", "shared"], "index_topk_pattern": "FSSS"}, [0, 1]),
    ],
)
def test_sharing_is_resolved_in_order(stated, full):
    assert full_layers(ModelConfig.from_dict({**NO_SHARING, **stated})) == full


def test_nvfp4_reexport():
    reexport = {
        **{key: value for key, value in GLM_5_2.items() if key != "moe_router_dtype"},
        "bos_token_id": 0,
        "mlp_bias": False,
        "num_experts": 256,
        "layer_types": ["deepseek_sparse_attention"] * 78,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }
    cfg = ModelConfig.from_dict(reexport)
    assert cfg.bos_token_id == 0
    assert cfg.quantization_config == reexport["quantization_config"]
    assert cfg.extra == {}
    assert ModelConfig.from_dict({k: v for k, v in reexport.items() if k != "n_routed_experts"}) == cfg


def test_legacy_keys():
    legacy = {key: value for key, value in TINY.items() if key not in ("rope_parameters", "dtype")}
    cfg = ModelConfig.from_dict({**legacy, "rope_theta": 20000, "torch_dtype": "float32"})
    assert (cfg.rope_theta, cfg.dtype) == (20000.0, "float32")


def test_rope_parameters_win_over_a_legacy_theta_and_the_log_says_so(caplog):
    assert ModelConfig.from_dict({**TINY, "rope_theta": 1e6}).rope_theta == 1e4
    assert "rope_theta 1000000.0 is not read" in caplog.text


def test_mlp_layer_types_win_over_first_k_dense_replace():
    cfg = ModelConfig.from_dict({**TINY, "mlp_layer_types": ["dense", "dense", "sparse", "dense"]})
    assert cfg.first_k_dense_replace == 2
    assert [cfg.is_moe(i) for i in range(5)] == [False, False, True, False, True]


def test_eos_token_id_is_a_tuple_however_it_is_spelled():
    for given, ids in ((7, (7,)), ([7, 8], (7, 8)), (None, ())):
        assert ModelConfig.from_dict({**TINY, "eos_token_id": given}).eos_token_id == ids


def test_unknown_keys_are_kept_and_listed():
    unknown = {"a_new_key": {"x": [1]}, "another": None}
    cfg = ModelConfig.from_dict({**TINY, **unknown})
    assert cfg.extra == unknown
    assert cfg.to_dict().items() >= unknown.items()


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_round_trip_is_stable(name, tmp_path):
    cfg = preset(name).replace(lora_norm_eps=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    again = ModelConfig.from_file(tmp_path)
    assert again == cfg == ModelConfig.from_file(tmp_path / "config.json")
    assert again.lora_norm_eps == 1e-5
    assert again.to_dict() == cfg.to_dict()


def test_replace_resolves_anew_what_follows_from_the_change():
    cfg = preset("tiny").replace(num_hidden_layers=6, index_topk_pattern="FSSFSS", first_k_dense_replace=2)
    assert full_layers(cfg) == [0, 3]
    assert cfg.mlp_layer_types == ("dense",) * 2 + ("sparse",) * 4
    assert cfg.replace(rope_theta=5.0, num_attention_heads=3).num_attention_heads == 3
    assert preset("tiny").indexer_types == ("full", "full", "shared", "full")  # the original is as it was


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_transformers_reads_the_same_architecture(name, tmp_path):
    auto = pytest.importorskip("transformers").AutoConfig
    ours = preset(name).replace(lora_norm_eps=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(ours.to_dict()))
    theirs = auto.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "GlmMoeDsaConfig"
    not_theirs = ("rope_theta", "dtype", "sharing", "unused", "extra", "quantization_config", "bos_token_id")
    for key, value in ours.model_dump(exclude={*not_theirs, "value_head"}).items():
        got = getattr(theirs, key)
        assert (tuple(got) if isinstance(value, tuple) else got) == value, key
    assert theirs.rope_parameters["rope_theta"] == ours.rope_theta
    theirs.save_pretrained(tmp_path)
    again = ModelConfig.from_file(tmp_path)
    assert again.to_dict() == {**ours.to_dict(), **again.unused, "bos_token_id": 0}


def test_a_config_that_transformers_writes_by_itself_is_read(tmp_path):
    config = pytest.importorskip("transformers").GlmMoeDsaConfig
    config(num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"]).save_pretrained(tmp_path)
    cfg = ModelConfig.from_file(tmp_path)
    assert cfg.mlp_layer_types == ("dense", "sparse", "sparse")
    assert (cfg.num_nextn_predict_layers, cfg.lora_norm_eps, cfg.extra) == (0, 1e-6, {})
