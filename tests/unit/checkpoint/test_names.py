"""The name table covers every parameter exactly once, in both directions and for both weight formats."""

import pytest
import torch

from glm5.checkpoint.names import SCALE_SUFFIX, Slot, slot_of
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import num_blocks
from glm5.model.glm5 import Glm5
from glm5.model.lowering import use_block_scaled
from tests.support.checkpoints import ragged, tiny


@pytest.mark.parametrize("fp8", [False, True], ids=["dense", "fp8"])
@pytest.mark.parametrize("make_cfg", [tiny, ragged])
def test_every_element_of_every_parameter_has_one_place_on_disk(make_cfg, fp8):
    cfg = make_cfg()
    specs = tensor_specs(cfg)
    with torch.device("meta"):
        model = Glm5(cfg)
        if fp8:
            use_block_scaled(model, {slot_of(spec.name).module for spec in specs if spec.fp8})
    covered = {name: torch.zeros(tensor.shape, dtype=torch.uint8) for name, tensor in model.state_dict().items()}
    on_disk = {spec.name: spec.shape for spec in specs}
    if fp8:
        grids = {spec.name: tuple(map(num_blocks, spec.shape)) for spec in specs if spec.fp8}
        on_disk |= {name + SCALE_SUFFIX: grid for name, grid in grids.items()}
    for name, shape in on_disk.items():
        slot = slot_of(name)
        place = slot.view(covered[slot.parameter])
        assert tuple(place.shape) == shape, name
        place += 1
    assert all((count == 1).all() for count in covered.values())


def test_gate_is_above_up():
    prefix = "model.layers.3.mlp.experts"
    assert slot_of(f"{prefix}.5.gate_proj.weight") == Slot(f"{prefix}.gate_up_proj", 5, 0, 2)
    assert slot_of(f"{prefix}.5.up_proj.weight_scale_inv") == Slot(f"{prefix}.gate_up_proj_scale_inv", 5, 1, 2)
    assert slot_of(f"{prefix}.5.down_proj.weight") == Slot(f"{prefix}.down_proj", 5, 0, 1)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.3.mlp.experts.5.gate_proj.bias",
        "model.layers.3.mlp.experts.5.other_proj.weight",
        "lm_head.weight",
    ],
)
def test_other_names_are_the_same_in_memory(name):
    assert slot_of(name) == Slot(name)
    assert slot_of(name).module == name.rpartition(".")[0]
