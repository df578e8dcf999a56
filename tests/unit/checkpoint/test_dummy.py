"""Random weights made in place: unit scale everywhere, routing that spreads, and the same for one seed."""

import pytest
import torch

from glm5.checkpoint.dummy import dummy
from glm5.checkpoint.load import empty_model
from glm5.common import host_memory
from glm5.common.errors import ConfigError
from glm5.config.presets import preset
from glm5.model.moe import MoE
from glm5.parallel.table import Shard, local_config


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@torch.inference_mode()
def test_activations_keep_their_scale_and_routing_spreads(fp8):
    cfg = preset("nano")
    model = dummy(cfg, fp8=fp8, dtype=torch.float32, seed=3)
    ids = torch.randint(2, cfg.vocab_size, (256,), generator=torch.Generator().manual_seed(0))
    received = []
    for layer in model.model.layers[: cfg.num_hidden_layers]:
        if isinstance(layer.mlp, MoE):
            layer.mlp.gate.register_forward_hook(lambda _, __, out: received.append(out[1]))
    logits = model.logits(ids.tolist())
    assert 0.5 < float(logits.std()) < 2
    counts = torch.stack([experts.flatten().bincount(minlength=cfg.n_routed_experts) for experts in received])
    even = 256 * cfg.num_experts_per_tok / cfg.n_routed_experts
    print(counts)
    assert float(counts.min()) > even / 3
    assert float(counts.max()) < even * 3


@pytest.mark.parametrize(("num_ranks", "free"), [(1, 1 << 16), (1 << 30, 1 << 40)], ids=["available", "of all ranks"])
def test_what_the_machine_has_no_memory_for_is_refused(num_ranks, free, monkeypatch):
    """Before any of it is taken: else the system would end whichever process it likes."""
    monkeypatch.setattr(host_memory, "available", lambda: free)
    cfg = local_config(preset("tiny"), 1)
    with pytest.raises(ConfigError, match=r"the weights take .* GB, and cpu has .* GB for them; take a smaller"):
        empty_model(cfg, frozenset(), torch.float32, torch.device("cpu"), num_ranks=num_ranks)
    empty_model(cfg, frozenset(), torch.float32, torch.device("meta"), num_ranks=num_ranks)


def test_one_seed_gives_one_model():
    first, again, other = (dummy(preset("tiny"), fp8=False, seed=seed).state_dict() for seed in (1, 1, 2))
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_ranks_share_what_every_one_has():
    cfg = preset("tiny")
    parts = [dummy(cfg, fp8=False, shard=Shard(rank, 2)).state_dict() for rank in range(2)]
    router, heads = "model.layers.1.mlp.gate.weight", "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(parts[0][router], parts[1][router])
    assert parts[0][heads].shape[1] == cfg.num_attention_heads * cfg.v_head_dim // 2
    assert not torch.equal(parts[0][heads], parts[1][heads])
    whole_width = cfg.num_attention_heads * cfg.v_head_dim
    assert float(parts[0][heads].float().std()) == pytest.approx(whole_width**-0.5, rel=0.1)
