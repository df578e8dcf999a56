"""Every kind of bad config.json gets one line that names the key, its value and what is allowed."""

import json
import os
from pathlib import Path

import pytest

from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.presets import preset

GOOD = preset("tiny").to_dict()
ABSENT = object()
UNSHARED = {"indexer_types": ABSENT, "index_topk_pattern": ABSENT}
UNTYPED = {"mlp_layer_types": ABSENT}

CASES = [
    ({"model_type": ABSENT}, "model_type: missing; allowed: 'glm_moe_dsa' (GLM-5, 5.1, 5.2, 5.3)"),
    ({"model_type": "glm5_next"}, "model_type: got 'glm5_next'; allowed: 'glm_moe_dsa' (GLM-5, 5.1, 5.2, 5.3)"),
    (
        {"architectures": ["DeepseekV32ForCausalLM"]},
        "architectures: got ['DeepseekV32ForCausalLM']; allowed: ['GlmMoeDsaForCausalLM']",
    ),
    ({"hidden_size": ABSENT}, "hidden_size: missing; allowed: a value as in the checkpoint's own config.json"),
    (
        {"q_lora_rank": ABSENT, "index_topk": ABSENT},
        "q_lora_rank, index_topk: missing; allowed: a value as in the checkpoint's own config.json",
    ),
    ({"hidden_size": "64"}, "hidden_size: got '64'; allowed: an integer"),
    ({"hidden_size": 64.0}, "hidden_size: got 64.0; allowed: an integer"),
    ({"vocab_size": True}, "vocab_size: got True; allowed: an integer"),
    ({"vocab_size": 0}, "vocab_size: got 0; allowed: at least 1"),
    ({"num_hidden_layers": None}, "num_hidden_layers: got None; allowed: an integer of 1 to 4096"),
    ({"num_hidden_layers": 10**30}, f"num_hidden_layers: got {10**30}; allowed: an integer of 1 to 4096"),
    ({"n_routed_experts": 2**31}, "n_routed_experts: got 2147483648; allowed: at most 65536 in 4 layers"),
    ({"rms_norm_eps": 0}, "rms_norm_eps: got 0; allowed: above 0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: got '1e-5'; allowed: a number"),
    ({"lora_norm_eps": -1e-6}, "lora_norm_eps: got -1e-06; allowed: above 0"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: got nan; allowed: a finite number"),
    ({"norm_topk_prob": 1}, "norm_topk_prob: got 1; allowed: true or false"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: got 2; allowed: at most 1"),
    ({"quantization_config": "fp8"}, "quantization_config: got 'fp8'; allowed: an object"),
    ({"dtype": "int8"}, "dtype: got 'int8'; allowed: bfloat16 or float16 or float32 or float64"),
    ({"eos_token_id": "</s>"}, "eos_token_id: got '</s>'; allowed: a token id or a list of token ids"),
    (
        {"indexer_types": ["full"] * 3},
        "indexer_types: got ['full', 'full', 'full']; allowed: 4 entries, one for each layer, not 3",
    ),
    (
        {"indexer_types": ["full", "skip", "full", "full"]},
        "indexer_types: got 'skip'; allowed: 'F' or 'full' (own indexer), 'S' or 'shared' (the one before)",
    ),
    (
        {**UNSHARED, "index_topk_pattern": "FFS"},
        "index_topk_pattern: got 'FFS'; allowed: 4 entries, one for each layer, not 3",
    ),
    (
        {**UNSHARED, "index_topk_pattern": "FFXS"},
        "index_topk_pattern: got 'X'; allowed: 'F' or 'full' (own indexer), 'S' or 'shared' (the one before)",
    ),
    (
        {**UNSHARED, "index_topk_pattern": 4},
        "index_topk_pattern: got 4; allowed: a string of F and S or a list of 'full' and 'shared'",
    ),
    (
        {**UNSHARED, "index_topk_pattern": "SFFF"},
        "index_topk_pattern: got 'SFFF'; allowed: a first entry 'full', because the first layer has nothing to share",
    ),
    (
        {**UNSHARED, "index_topk_freq": 4, "index_skip_topk_offset": 0},
        "index_skip_topk_offset: got 0; allowed: at least 1, because the first layer has nothing to share",
    ),
    ({**UNSHARED, "index_topk_freq": 0}, "index_topk_freq: got 0; allowed: an integer of at least 1"),
    ({**UNSHARED, "index_skip_topk_offset": "3"}, "index_skip_topk_offset: got '3'; allowed: an integer"),
    (
        {"mlp_layer_types": ["dense", "moe", "sparse", "sparse"]},
        "mlp_layer_types: got 'moe'; allowed: 'dense' or 'sparse'",
    ),
    (
        {"mlp_layer_types": ["dense"]},
        "mlp_layer_types: got ['dense']; allowed: 4 entries, one for each layer, not 1",
    ),
    ({"mlp_layer_types": "dsss"}, "mlp_layer_types: got 'dsss'; allowed: a list of 'dense' and 'sparse'"),
    (
        {**UNTYPED, "first_k_dense_replace": ABSENT},
        "first_k_dense_replace: got None; allowed: an integer of at least 0, or the key mlp_layer_types",
    ),
    (
        {**UNTYPED, "moe_layer_freq": 2},
        "moe_layer_freq: got 2; allowed: 1, or any together with mlp_layer_types",
    ),
    (
        {"rope_parameters": ABSENT},
        "rope_parameters.rope_theta: missing; allowed: a number above 0 (there is no default)",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4}},
        "rope_parameters.rope_type: got 'yarn'; allowed: 'default' (the GLM-5 family has no rope scaling)",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor: got 0.5; allowed: 1.0 (the rotary width is qk_rope_head_dim)",
    ),
    ({"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta: got -1; allowed: a number above 0"),
    (
        {"rope_parameters": {"rope_theta": 10**309}},
        f"rope_parameters.rope_theta: got {str(10**309)[:18]}...{'0' * 19}; allowed: a number above 0",
    ),
    ({"rope_parameters": 1e6}, "rope_parameters: got 1000000.0; allowed: a mapping with rope_theta and rope_type"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: got {'type': 'yarn'}; allowed: None"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim: got 7; allowed: an even number (rotary pairs)"),
    ({"index_head_dim": 4}, "index_head_dim: got 4; allowed: at least qk_rope_head_dim, 8"),
    ({"n_group": 3}, "n_group: got 3; allowed: a divisor of n_routed_experts, 8"),
    ({"n_group": 8}, "n_group: got 8; allowed: at most 4: a group needs two experts"),
    ({"topk_group": 2}, "topk_group: got 2; allowed: at most n_group, 1"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok: got 9; allowed: at most 8, the experts to pick from"),
    (
        {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
        "num_experts_per_tok: got 3; allowed: at most 2, the experts to pick from",
    ),
    ({"num_experts": 16}, "num_experts: got 16; allowed: the value of n_routed_experts, 8"),
    ({"num_key_value_heads": 1}, "num_key_value_heads: got 1; allowed: the value of num_attention_heads, 4"),
    ({"attention_bias": True}, "attention_bias: got True; allowed: False"),
    ({"attention_dropout": 0.1}, "attention_dropout: got 0.1; allowed: 0.0"),
    ({"mlp_bias": True}, "mlp_bias: got True; allowed: False"),
    ({"scoring_func": "softmax"}, "scoring_func: got 'softmax'; allowed: 'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method: got 'greedy'; allowed: 'noaux_tc'"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings: got True; allowed: False"),
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'; allowed: 'silu'"),
    ({"rope_interleave": False}, "rope_interleave: got False; allowed: True"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave: got False; allowed: True"),
    ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype: got 'bfloat16'; allowed: 'float32' or 'fp32' or None"),
    ({"layer_types": 5}, "layer_types: got 5; allowed: 'indexed_attention' or 'deepseek_sparse_attention'"),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        "quantization_config.weight_block_size: got [64, 64]; allowed: [128, 128]",
    ),
    (
        {"layer_types": ["full_attention"] * 4},
        "layer_types: got 'full_attention'; allowed: 'indexed_attention' or 'deepseek_sparse_attention'",
    ),
]


@pytest.mark.parametrize(("changes", "message"), CASES, ids=[message.partition(";")[0] for _, message in CASES])
def test_message(changes, message):
    raw = {key: value for key, value in {**GOOD, **changes}.items() if value is not ABSENT}
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw)
    assert str(caught.value) == message


def test_the_unchanged_config_is_good():
    assert ModelConfig.from_dict(GOOD) == preset("tiny")


@pytest.mark.parametrize("value", [["full"] * 500, [[["full"] * 9] * 9] * 9, 16**5000, [16**5000]], ids=type)
def test_long_values_are_cut(value):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict({**GOOD, "indexer_types": value})
    assert len(str(caught.value)) < 350
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "{path}: no such file; a checkpoint folder holds a config.json"),
        ("{", "{path}: not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ('{"a": ' + "[" * 100_000, "{path}: not valid JSON (maximum recursion depth exceeded"),
        (f'{{"a": {"9" * 5000}}}', "{path}: not valid JSON (Exceeds the limit (4300 digits)"),
        (b"\xff", "{path}: cannot be read: 'utf-8' codec can't decode byte 0xff"),
        ("[1]", "{path}: got a JSON list; allowed: an object"),
        (
            json.dumps({**GOOD, "hidden_act": "gelu"}),
            "{path}: hidden_act: got 'gelu'; allowed: 'silu'",
        ),
    ],
)
def test_file_is_named(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(tmp_path)
    assert str(caught.value).startswith(message.format(path=path))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_what_is_no_file_is_not_read(tmp_path, make):
    make(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        ModelConfig.from_file(tmp_path)


def test_a_name_too_long_for_the_system():
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        ModelConfig.from_file("x" * 5000)


def test_an_unknown_preset_is_refused_with_the_names():
    with pytest.raises(ConfigError) as caught:
        preset("glm-6")
    assert str(caught.value) == "preset: got 'glm-6'; allowed: glm-5, glm-5.2, nano, tiny"
