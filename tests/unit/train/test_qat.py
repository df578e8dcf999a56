"""Quantization-aware training: what is trained is what is packed, bit for bit; parameters stay who they are."""

import pytest
import torch

import glm5
from glm5.cli.main import main
from glm5.common.errors import ConfigError
from glm5.config.presets import preset
from glm5.model.glm5 import Glm5
from glm5.model.init import init_weights
from glm5.model.packed import PackedView
from glm5.quant.qat import fake_int4, is_int4
from glm5.train.estimate import estimate
from glm5.train.loop import train
from glm5.train.qat import FakeInt4Experts, set_fake_int4
from tests.support.training import recipe, recipe_file, stage

IDS = torch.arange(40) % 300


def small(**changes) -> Glm5:
    model = Glm5(preset("nano").replace(num_hidden_layers=2, index_topk_pattern="FF", dtype="float32", **changes))
    init_weights(model.float(), 0)
    return model.requires_grad_()


def hidden(model: Glm5) -> torch.Tensor:
    return model(IDS, PackedView([len(IDS)], stage="dense"))


def test_experts_compute_with_int4_and_learn_as_if_not():
    model, plain = small(), small()
    before = dict(model.named_parameters())
    set_fake_int4(model, aware=True)
    assert {name: id(weight) for name, weight in model.named_parameters()} == {k: id(w) for k, w in before.items()}
    assert isinstance(model.model.layers[1].mlp.experts, FakeInt4Experts)
    assert not isinstance(model.model.layers[2].mlp.experts, FakeInt4Experts), "the MTP layer is not quantized either"
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if ".experts." in name and ".layers.1." in name:
                weight.copy_(fake_int4(weight.bfloat16()).float())
    assert torch.equal(hidden(model), hidden(plain))
    for each in (model, plain):
        hidden(each).square().sum().backward()
    for name, weight in model.named_parameters():
        other = plain.get_parameter(name).grad
        assert (weight.grad is None) == (other is None)
        assert weight.grad is None or torch.equal(weight.grad, other), name
    set_fake_int4(model, aware=False)
    assert not any(isinstance(part, FakeInt4Experts) for part in model.modules())


def test_widths_that_have_no_groups_are_refused():
    with pytest.raises(ConfigError, match="qat: experts of 128 x 96; both must be multiples of 128"):
        set_fake_int4(small(moe_intermediate_size=96), aware=True)


def test_widths_are_refused_before_the_stages_in_front(tmp_path):
    requested = recipe(tmp_path, "run", stage(name="a"), stage(name="b", kind="sft", qat='"int4"'))
    for begin in (lambda: estimate(requested), lambda: train(requested, tmp_path)):
        with pytest.raises(ConfigError, match="both must be multiples of 128"):
            begin()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_stage_ends_in_masters_and_the_int4_it_was_trained_as(tmp_path, capsys):
    file = recipe_file(tmp_path, stage(kind="sft", steps=2, qat='"int4"'))
    text = file.read_text().replace('preset = "tiny"', 'preset = "nano"').replace('dtype = "float32"', "")
    file.write_text(text)
    assert main(["train", str(file), "--set", f"out={tmp_path / 'out'}"]) == 0
    packed = tmp_path / "out" / "dense" / "step-00000002-int4"
    assert f"packed: {packed}" in capsys.readouterr().out
    masters, codes = glm5.load(tmp_path / "out/dense/last"), glm5.load(packed)
    assert masters.cfg.extra["quantization_aware"] == {"bits": 4, "group_size": 128}
    experts = masters.model.layers[1].mlp.experts.gate_up_proj
    assert experts.dtype == torch.bfloat16
    assert not is_int4(experts), "masters are not rounded"
    set_fake_int4(masters, aware=True)
    seen = fake_int4(experts)
    stored = codes.model.layers[1].mlp.experts
    unpacked = torch.stack([stored.gate_up_proj & 15, stored.gate_up_proj >> 4], -1).flatten(-2).to(torch.int8)
    values = torch.where(unpacked > 7, unpacked - 16, unpacked) * stored.gate_up_proj_scale.repeat_interleave(128, -1)
    assert torch.equal(values.to(torch.bfloat16), seen)
    assert main(["train", str(file), "--set", f"out={tmp_path / 'out'}"]) == 0, "a finished run says so again"
