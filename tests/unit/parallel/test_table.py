"""Every tensor has one placement, parts make up the whole, and what cannot be dealt out is refused with the numbers."""

import pytest
import torch

from glm5.common.errors import ConfigError
from glm5.config.presets import preset
from glm5.config.tensors import tensor_specs
from glm5.model.glm5 import Glm5
from glm5.parallel.table import TABLE, Shard, Span, check_blocks, local_config, placement_of, scale_span, span_of
from tests.support.checkpoints import ragged


def few_layers():
    """GLM-5's widths."""
    return preset("glm-5").replace(num_hidden_layers=6, n_routed_experts=16)


@pytest.mark.parametrize("cfg", [few_layers(), preset("nano"), preset("tiny")], ids=["glm-5", "nano", "tiny"])
def test_every_tensor_of_a_checkpoint_has_a_placement_and_no_row_is_idle(cfg):
    used = set()
    for spec in tensor_specs(cfg):
        assert placement_of(spec.name) is placement_of(spec.name + "_scale_inv")
        used |= {key for key, placement in TABLE.items() if placement is placement_of(spec.name)}
    assert used == set(TABLE)
    with pytest.raises(KeyError):
        placement_of("model.layers.3.self_attn.bias")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_tile_every_tensor_and_are_what_a_ranks_modules_hold(size):
    cfg = preset("tiny")
    with torch.device("meta"):
        local = {name: tensor.shape for name, tensor in Glm5(local_config(cfg, size)).state_dict().items()}
    for spec in tensor_specs(cfg):
        spans = [span_of(spec.name, spec.shape, Shard(rank, size)) for rank in range(size)]
        shape = list(spec.shape)
        if size == 1 or placement_of(spec.name).dim is None:
            assert spans == [None] * size
        else:
            assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
            assert spans[-1].stop == spec.shape[spans[0].dim]
            shape[spans[0].dim] //= size
        if ".mlp.experts." not in spec.name:
            assert list(local[spec.name]) == shape


def test_full_size_shapes():
    cfg = few_layers()
    names = {
        "model.layers.5.self_attn.q_b_proj.weight": Span(0, 2048, 4096),
        "model.layers.5.self_attn.kv_b_proj.weight": Span(0, 3584, 7168),
        "model.layers.5.self_attn.o_proj.weight": Span(1, 2048, 4096),
        "model.layers.5.mlp.experts.9.up_proj.weight": Span(0, 256, 512),
        "model.layers.5.mlp.experts.9.down_proj.weight": Span(1, 256, 512),
        "model.layers.0.mlp.down_proj.weight": Span(1, 1536, 3072),
        "lm_head.weight": Span(0, 19360, 38720),
        "model.layers.5.self_attn.indexer.wq_b.weight": None,
    }
    shapes = {spec.name: spec.shape for spec in tensor_specs(cfg)}
    assert {name: span_of(name, shapes[name], Shard(1, 8)) for name in names} == names
    assert scale_span(Span(1, 256, 512)) == Span(1, 2, 4)
    check_blocks(cfg, [(spec.name, spec.shape) for spec in tensor_specs(cfg) if spec.fp8], 8)


def test_what_does_not_divide_is_refused_with_what_is_allowed():
    with pytest.raises(
        ConfigError, match=r"got 3, which does not divide this model's .*num_attention_heads 4.*1, 2, 4$"
    ):
        local_config(preset("tiny"), 3)
    with pytest.raises(ConfigError, match=r"moe_intermediate_size 136; allowed here: 1, 2, 4, 8$"):
        local_config(ragged().replace(num_attention_heads=16, intermediate_size=320), 16)
    with pytest.raises(ConfigError, match=r"got 128, which .*num_attention_heads 64.*: .*, 8, 16, 32, 64$"):
        local_config(preset("glm-5"), 128)


def test_parts_of_fp8_weights_must_be_whole_blocks_or_lie_in_one():
    cfg = few_layers()
    fp8 = [(spec.name, spec.shape) for spec in tensor_specs(cfg) if spec.fp8]
    with pytest.raises(
        ConfigError, match=r"cuts model\.layers\.\*\.\S+ and \d more .* into \d+, which is no multiple of 128"
    ):
        check_blocks(cfg, fp8, 64)
    check_blocks(cfg, fp8, 32)
    tiny = preset("tiny")
    check_blocks(tiny, [(spec.name, spec.shape) for spec in tensor_specs(tiny) if spec.fp8], 2)
