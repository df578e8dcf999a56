"""Adapters in PEFT's layout: what is no such adapter, or fits no such model, is said before anything changes."""

import json

import pytest
import torch

from glm5.checkpoint.adapters import merge, read_adapter, write_adapter
from glm5.common.errors import CheckpointError
from glm5.config.presets import preset
from glm5.model.glm5 import Glm5
from glm5.model.init import init_weights

O_PROJ = "model.layers.0.self_attn.o_proj"


def pair(rows, cols, rank=2):
    gen = torch.Generator().manual_seed(rows)
    return torch.randn(rank, cols, generator=gen), torch.randn(rows, rank, generator=gen)


@pytest.fixture
def model():
    built = Glm5(preset("tiny").replace(dtype="float32")).float()
    init_weights(built, 0)
    return built


def test_what_is_written_is_read_and_added(tmp_path, model):
    a, b = pair(64, 64)
    write_adapter(tmp_path / "one", {O_PROJ: (a, b)}, rank=2, alpha=8.0, base="somewhere")
    adapter = read_adapter(tmp_path / "one")
    assert adapter.scale == 4.0
    assert torch.equal(adapter.matrices[O_PROJ][0], a)
    before = model.get_submodule(O_PROJ).weight.detach().clone()
    assert merge(model, tmp_path / "one") == 1
    torch.testing.assert_close(model.get_submodule(O_PROJ).weight.detach(), before + 4 * b @ a)


def test_rank_stabilised_scale(tmp_path):
    write_adapter(tmp_path / "one", {O_PROJ: pair(64, 64, 4)}, rank=4, alpha=8.0, base="somewhere")
    file = tmp_path / "one" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_rslora": True}))
    assert read_adapter(tmp_path / "one").scale == 4.0


@pytest.mark.parametrize(
    ("module", "shape", "said"),
    [
        ("model.layers.9.self_attn.o_proj", (64, 64), "is not a module of this model"),
        (O_PROJ, (64, 32), r"is \[64, 32\] in the adapter and \[64, 64\] in the model"),
        ("model.norm", (64, 64), "is RMSNorm in this model, which cannot be merged into"),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path, model, module, shape, said):
    write_adapter(tmp_path / "one", {O_PROJ: pair(64, 64), module: pair(*shape)}, rank=2, alpha=2.0, base="x")
    before = model.get_submodule(O_PROJ).weight.detach().clone()
    with pytest.raises(CheckpointError, match=said):
        merge(model, tmp_path / "one")
    assert torch.equal(model.get_submodule(O_PROJ).weight, before)


def test_other_kinds_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not an adapter in PEFT's layout"):
        read_adapter(tmp_path)
    write_adapter(tmp_path / "one", {O_PROJ: pair(64, 64)}, rank=2, alpha=2.0, base="x")
    file = tmp_path / "one" / "adapter_config.json"
    for change, said in (({"peft_type": "IA3"}, "allowed: LORA"), ({"use_dora": True}, "use_dora is set")):
        file.write_text(json.dumps({**json.loads(file.read_text()), "peft_type": "LORA", "use_dora": False, **change}))
        with pytest.raises(CheckpointError, match=said):
            read_adapter(tmp_path / "one")
