"""A start from dense MLA: GLM-4.7-Flash's layout as transformers writes it, and the numbers that transformers gets."""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.glm4_moe_lite import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from glm5.checkpoint.dense_mla import INDEXER, config_to_train, has_no_indexers, indexers, load_dense
from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.common.errors import CheckpointError, ConfigError
from glm5.config.train import read_recipe
from glm5.model.packed import PackedView
from glm5.train.estimate import estimate
from glm5.train.loop import train
from tests.support.checkpoints import edit_json, edit_tensors, read_tensors
from tests.support.parity import BUDGET, randomize

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "max_position_embeddings": 512,
    "eos_token_id": [1],
    "pad_token_id": 0,
}
INDEX = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16}
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def theirs() -> Glm4MoeLiteForCausalLM:
    cfg = Glm4MoeLiteConfig(**SIZES, dtype="float32", architectures=["Glm4MoeLiteForCausalLM"])
    cfg._attn_implementation = cfg._experts_implementation = "eager"
    model = Glm4MoeLiteForCausalLM(cfg).eval()
    randomize(model, seed=5)
    return model


@pytest.fixture
def dense(theirs, tmp_path) -> Path:
    """As transformers writes it, one tensor an expert."""
    theirs.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def start(path: Path, seed: int = 0, **changes):
    return load_dense(path, config_to_train(path, INDEX | changes), "float32", seed)


def logits(model, ids_T, stage) -> torch.Tensor:
    return model.head(model(ids_T, PackedView([len(ids_T)], stage=stage)))


@torch.no_grad()
def test_dense_attention_computes_what_transformers_does(theirs, dense):
    assert has_no_indexers(dense)
    assert {name for name in read_tensors(dense) if "experts.7." in name}
    ids_T = torch.randint(0, 320, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    want, model = theirs(ids_T[None]).logits[0], start(dense)
    assert (logits(model, ids_T, "dense") - want).abs().max() < BUDGET
    assert (logits(model, ids_T, "sparse") - want).abs().max() > 10 * BUDGET, "random indexers select others"
    assert (logits(start(dense, index_topk=NUM_TOKENS), ids_T, "sparse") - want).abs().max() < BUDGET


def test_indexers_are_random_and_follow_from_the_seed(dense):
    model, same, other = (dict(indexers(start(dense, seed))) for seed in (0, 0, 1))
    assert len(model) == 5 * SIZES["num_hidden_layers"]
    assert all(torch.equal(model[name], same[name]) for name in model)
    changed = {name for name in model if not torch.equal(model[name], other[name])}
    assert changed == {name for name in model if "k_norm" not in name}
    assert 0.018 < torch.cat([model[name].flatten() for name in changed]).std() < 0.022


def test_what_was_started_is_an_ordinary_checkpoint(dense, tmp_path):
    model = start(dense, index_topk_pattern="FFS")
    save(model, tmp_path / "started")
    assert not has_no_indexers(tmp_path / "started")
    again = load(tmp_path / "started")
    assert again.cfg.indexer_types == ("full", "full", "shared")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_mtp_layer_comes_along(dense):
    """As published: a layer behind the last, with copies of embedding and head."""
    layer = f"model.layers.{SIZES['num_hidden_layers']}."

    def add(tensors) -> None:
        last = f"model.layers.{SIZES['num_hidden_layers'] - 1}."
        tensors |= {layer + name[len(last) :]: t.clone() for name, t in tensors.items() if name.startswith(last)}
        width = SIZES["hidden_size"]
        tensors |= {layer + name: torch.ones(width) for name in ("enorm.weight", "hnorm.weight")}
        tensors[layer + "shared_head.norm.weight"] = torch.ones(width)
        tensors[layer + "eh_proj.weight"] = torch.ones(width, 2 * width)
        tensors[layer + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[layer + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    edit_tensors(dense, add)
    edit_json(dense / "config.json", num_nextn_predict_layers=1)
    model = start(dense)
    assert model.cfg.num_nextn_predict_layers == 1
    assert sum(INDEXER in name for name, _ in indexers(model)) == 5 * (SIZES["num_hidden_layers"] + 1)
    assert torch.equal(model.get_parameter(layer + "eh_proj.weight"), torch.ones(64, 128))


def test_what_does_not_fit_is_said(dense):
    edit_json(dense / "config.json", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(ConfigError, match=r"config.json: rope_parameters.rope_type: got 'yarn'"):
        config_to_train(dense, INDEX)
    edit_json(dense / "config.json", rope_parameters=SIZES["rope_parameters"])
    edit_tensors(dense, lambda tensors: tensors.pop("model.layers.1.self_attn.kv_b_proj.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing tensor \(model.layers.1.self_attn.kv_b_proj.weight"):
        start(dense)


RECIPE = """
name = "from-dense"
threads = 1
[model]
checkpoint = "DENSE"
config = {index_topk = 8, index_n_heads = 16, index_head_dim = 16}
[losses]
mtp_depth = 0
[[stage]]
name = "warmup"
kind = "warmup"
steps = 1
seq_len = 64
sequences = 1
lr = 1e-2
data = [{kind = "needle"}]
[[stage]]
name = "sparse"
kind = "sparse"
steps = 1
seq_len = 64
sequences = 1
lr = 1e-3
data = [{kind = "needle"}]
"""


def test_a_recipe_goes_from_dense_weights_to_selected_keys(dense, tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE.replace("DENSE", str(dense)))
    recipe = read_recipe(tmp_path / "r.toml", [f"out={tmp_path / 'run'}"])
    assert "stage sparse (sparse): 1 steps" in estimate(recipe)
    out = train(recipe, tmp_path)
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["index_topk"]) == ("glm_moe_dsa", 8)
    warm, before = read_tensors(tmp_path / "run" / "warmup" / "last"), read_tensors(dense)
    assert all(torch.equal(warm[name], tensor) for name, tensor in before.items()), "warm-up trains indexers alone"
    after = read_tensors(out)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert not torch.equal(after[name], before[name])
