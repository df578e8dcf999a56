"""What the small presets promise to the demo and to quantization."""

import pytest

from glm5.config.presets import preset


@pytest.mark.parametrize("name", ["nano", "tiny"])
def test_small_presets_have_every_part_of_the_architecture(name):
    cfg = preset(name)
    assert cfg.index_n_heads >= 16  # fewer, and scores tie at 0
    assert "shared" in cfg.indexer_types
    assert {"dense", "sparse"} == set(cfg.mlp_layer_types)
    assert cfg.num_nextn_predict_layers == 1
    assert cfg.num_experts_per_tok < cfg.n_routed_experts


def test_nano_fits_every_quantization_scheme():
    cfg = preset("nano")
    assert cfg.hidden_size % 128 == cfg.moe_intermediate_size % 128 == 0
    for size in (cfg.q_lora_rank, cfg.kv_lora_rank, cfg.v_head_dim):
        assert size & (size - 1) == 0
