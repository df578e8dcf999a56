"""Loading: what ends up in memory, for every weight format, and bit-equal to an independent rounding."""

import logging

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.load import load
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.save import save
from glm5.config.tensors import tensor_specs
from glm5.model.experts import BlockScaledExperts
from glm5.model.linear import BlockScaledLinear, Linear
from tests.support.checkpoints import edit_json, edit_tensors, ragged, read_tensors, tiny, write_tensors
from tests.support.models import random_model

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
WK = "model.layers.0.self_attn.indexer.wk.weight"


def exact_product(weight: Tensor, scale: Tensor) -> Tensor:
    """float64, exact (4 + 24 bits), every scale looked up by the index of its block."""
    rows, cols = (torch.arange(size) // 128 for size in weight.shape)
    return weight.double() * scale.double()[rows][:, cols]


def nearest(exact_f64: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest value of `dtype`, ties to even, chosen among three neighbours by their float64 distances."""
    guess = exact_f64.to(dtype)
    bits = guess.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    neighbours = torch.stack([(bits + step).view(dtype) for step in (-1, 0, 1)])
    distance = (neighbours.double() - exact_f64).abs()
    odd = torch.stack([(bits + step) % 2 for step in (-1, 0, 1)])
    best = (distance * 2).nan_to_num(torch.inf)
    tied = best == best.min(0).values
    pick = torch.where(tied & (odd == 0), 2, torch.where(tied, 1, 0)).argmax(0)
    return neighbours.gather(0, pick[None])[0]


def on_disk(model) -> dict[str, Tensor]:
    """The model's tensors under their names on disk, scales of FP8 weights included."""
    state = model.state_dict()
    found = {}
    for spec in tensor_specs(model.cfg):
        for name in (spec.name, spec.name + SCALE_SUFFIX):
            slot = slot_of(name)
            if slot.parameter in state:
                found[name] = slot.view(state[slot.parameter])
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ragged_fp8_is_the_float64_product_rounded_once(fp8, dtype, seed):
    generator = torch.Generator().manual_seed(seed)

    def spread_scales(tensors):
        for name, tensor in tensors.items():
            if name.endswith(SCALE_SUFFIX):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)

    edit_tensors(fp8, spread_scales)
    stored = read_tensors(fp8)
    loaded = on_disk(load(fp8, dtype=dtype))
    num_scaled = 0
    for name, tensor in loaded.items():
        if (scale := stored.get(name + SCALE_SUFFIX)) is not None:
            assert same_bits(tensor, nearest(exact_product(stored[name], scale), dtype)), name
            num_scaled += 1
    assert num_scaled == sum(spec.fp8 for spec in tensor_specs(ragged()))
    assert any(spec.shape[0] % 128 and spec.shape[1] % 128 for spec in tensor_specs(ragged()) if spec.fp8)


def test_control_a_second_rounding_would_show(seed):
    scale = torch.rand(1_000_000, generator=torch.Generator().manual_seed(seed)).double() + 0.5
    exact = 1.125 * scale
    assert not torch.equal(exact.to(torch.bfloat16), nearest(exact, torch.bfloat16))


def test_control_a_stretched_grid_would_show(fp8):
    stored = read_tensors(fp8)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    scale = stored[name + SCALE_SUFFIX]
    stretched = scale.repeat_interleave(stored[name].shape[0] // scale.shape[0], 0)[:, [0] * 128 + [1] * 72]
    assert not torch.equal(stored[name].double() * stretched.double(), exact_product(stored[name], scale))


def test_auto_keeps_fp8_as_it_is(fp8):
    stored = read_tensors(fp8)
    model = load(fp8)
    kept = on_disk(model)
    assert kept.keys() == stored.keys()
    assert all(same_bits(kept[name], stored[name]) for name in stored)
    assert isinstance(model.model.layers[1].mlp.experts, BlockScaledExperts)
    assert isinstance(model.model.layers[0].self_attn.kv_b_proj, BlockScaledLinear)
    assert isinstance(model.model.layers[0].self_attn.indexer.weights_proj, Linear)
    assert model.cfg.quantization_config is not None
    assert not model.training
    assert model.logits([1, 2, 3]).isfinite().all()


def test_auto_keeps_the_dtype_and_a_name_casts(bf16):
    stored = read_tensors(bf16)
    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32), (torch.float64, torch.float64)):
        model = load(bf16, dtype=dtype)
        assert model.dtype == expected
        assert model.cfg.dtype == str(expected).removeprefix("torch.")
        for name, tensor in on_disk(model).items():
            kept_wide = name.endswith("e_score_correction_bias")
            assert same_bits(tensor, stored[name].to(torch.float32 if kept_wide else expected)), name


def test_selection_bias_is_float32_even_when_stored_as_bfloat16(bf16):
    edit_tensors(bf16, lambda tensors: tensors.update({BIAS: tensors[BIAS].bfloat16()}))
    for dtype in ("auto", "bfloat16", "float64"):
        bias = load(bf16, dtype=dtype).state_dict()[BIAS]
        assert same_bits(bias, read_tensors(bf16)[BIAS].float())


def test_auto_makes_one_dtype_of_a_mixed_checkpoint(bf16):
    def widen_norms(tensors):
        tensors.update({name: tensor.float() for name, tensor in tensors.items() if "norm" in name})

    edit_tensors(bf16, widen_norms)
    model = load(bf16)
    assert {name: t.dtype for name, t in model.state_dict().items() if t.dtype != torch.bfloat16} == {
        name: torch.float32 for name in model.state_dict() if name.endswith("e_score_correction_bias")
    }


def test_float64_files_round_once(bf16, seed):
    name = "lm_head.weight"
    exact = torch.rand(320, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    exact[0, 0] = 1 + 2**-8 + 2**-40  # just above the middle of two bfloat16 values: through float32 a tie, to even
    edit_tensors(bf16, lambda tensors: tensors.update({name: exact}))
    loaded = load(bf16, dtype="bfloat16").lm_head.weight
    assert same_bits(loaded, nearest(exact, torch.bfloat16))
    assert not same_bits(loaded, exact.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weight_and_scale_in_different_shards(fp8, dtype):
    before = load(fp8, dtype=dtype).state_dict()
    write_tensors(fp8, read_tensors(fp8), lambda name: 0 if name.endswith(SCALE_SUFFIX) else 1 + len(name) % 3)
    after = load(fp8, dtype=dtype).state_dict()
    assert all(same_bits(before[name], after[name]) for name in before)


def test_presence_of_a_scale_decides_not_the_list(fp8):
    weight = read_tensors(fp8)[WK].float().bfloat16()

    def make_dense(tensors):
        del tensors[WK + SCALE_SUFFIX]
        tensors[WK] = weight

    edit_tensors(fp8, make_dense)
    quantization = load(fp8).cfg.quantization_config
    edit_json(fp8 / "config.json", quantization_config=quantization | {"modules_to_not_convert": ["model.layers.0"]})
    layer = load(fp8).model.layers[0]
    assert isinstance(layer.self_attn.indexer.wk, Linear)
    assert same_bits(layer.self_attn.indexer.wk.weight, weight)
    assert isinstance(layer.mlp.gate_proj, BlockScaledLinear)
    (fp8 / "config.json").write_text((fp8 / "config.json").read_text().replace("quantization_config", "other_key"))
    assert isinstance(load(fp8).model.layers[0].mlp.gate_proj, BlockScaledLinear)


def test_a_module_with_both_kinds_of_weights_is_dequantized(fp8):
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    stored = read_tensors(fp8)
    dense = torch.randn(stored[name].shape).bfloat16()

    def make_dense(tensors):
        del tensors[name + SCALE_SUFFIX]
        tensors[name] = dense

    edit_tensors(fp8, make_dense)
    model = load(fp8)
    assert same_bits(on_disk(model)[name], dense)
    other = name.replace("up_proj", "gate_proj")
    exact = exact_product(stored[other], stored[other + SCALE_SUFFIX])
    assert same_bits(on_disk(model)[other], nearest(exact, torch.bfloat16))
    assert isinstance(model.model.layers[2].mlp.experts, BlockScaledExperts)


def test_fp8_head_and_embedding_are_dequantized(fp8):
    stored = read_tensors(fp8)
    name = "lm_head.weight"
    scale = torch.rand(3, 2) + 0.5
    weight = stored[name].float().to(torch.float8_e4m3fn)
    edit_tensors(fp8, lambda tensors: tensors.update({name: weight, name + SCALE_SUFFIX: scale}))
    assert same_bits(load(fp8).lm_head.weight, nearest(exact_product(weight, scale), torch.bfloat16))


def test_copies_in_the_mtp_layer_are_ignored_and_reported(bf16, caplog):
    before = load(bf16).state_dict()
    copies = {
        f"model.layers.4.{name}": torch.ones(320, 64) for name in ("embed_tokens.weight", "shared_head.head.weight")
    }
    edit_tensors(bf16, lambda tensors: tensors.update(copies))
    with caplog.at_level(logging.INFO, "glm5"):
        after = load(bf16).state_dict()
    assert all(same_bits(before[name], after[name]) for name in before)
    assert "ignored 2 tensors (model.layers.4.embed_tokens.weight: the MTP layer reads the main model's" in caplog.text


def test_indexers_of_layers_that_share_are_ignored(tmp_path, caplog):
    everyone = tiny().replace(index_topk_pattern="FFFF")
    save(random_model(3, everyone), tmp_path / "all")
    config = (tmp_path / "all/config.json").read_text()
    (tmp_path / "all/config.json").write_text(config.replace('"full"', '"shared"').replace('"shared"', '"full"', 2))
    with caplog.at_level(logging.INFO, "glm5"):
        model = load(tmp_path / "all")
    assert model.cfg.indexer_types == ("full", "full", "shared", "shared")
    assert "ignored 10 tensors" in caplog.text


def test_a_checkpoint_without_mtp_tensors_loads_without_the_layer(bf16, caplog):
    edit_tensors(bf16, lambda t: [t.pop(name) for name in list(t) if name.startswith("model.layers.4.")])
    model = load(bf16)
    assert model.cfg.num_nextn_predict_layers == 0
    assert len(model.model.layers) == 4
    assert "has no MTP tensors: loaded without the MTP layer" in caplog.text


def test_mtp_tensors_are_ignored_where_the_config_has_no_such_layer(bf16, caplog):
    edit_json(bf16 / "config.json", num_nextn_predict_layers=0)
    with caplog.at_level(logging.INFO, "glm5"):
        assert len(load(bf16).model.layers) == 4
    assert "part of an MTP layer" in caplog.text


def test_lora_norm_eps_is_a_setting_and_is_saved(bf16, tmp_path):
    assert load(bf16).cfg.lora_norm_eps == 1e-6
    model = load(bf16, lora_norm_eps=1e-5)
    assert model.cfg.lora_norm_eps == 1e-5
    save(model, tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.cfg.lora_norm_eps == 1e-5
    assert again.model.layers[0].self_attn.q_a_layernorm.eps == 1e-5
    assert torch.equal(again.logits([1, 2, 3]), model.logits([1, 2, 3]))


def test_no_parameter_is_left_unread(bf16, monkeypatch):
    """Fresh memory is poisoned, so a place that nothing was read into shows as NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    assert all(not tensor.isnan().any() for tensor in load(bf16, dtype="float32").state_dict().values())
