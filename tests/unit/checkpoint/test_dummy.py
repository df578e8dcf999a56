"""Random weights made in place: unit scale everywhere, routing that spreads, and the same for one seed."""

import pytest
import torch

from glm5.checkpoint.dummy import dummy
from glm5.config.presets import preset
from glm5.model.moe import MoE


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@torch.inference_mode()
def test_activations_keep_their_scale_and_routing_spreads(fp8):
    cfg = preset("nano")
    model = dummy(cfg, fp8=fp8, dtype=torch.float32, seed=3)
    ids = torch.randint(2, cfg.vocab_size, (256,), generator=torch.Generator().manual_seed(0))
    heard = []
    for layer in model.model.layers[: cfg.num_hidden_layers]:
        if isinstance(layer.mlp, MoE):
            layer.mlp.gate.register_forward_hook(lambda _, __, out: heard.append(out[1]))
    logits = model.logits(ids.tolist())
    assert 0.5 < float(logits.std()) < 2
    counts = torch.stack([experts.flatten().bincount(minlength=cfg.n_routed_experts) for experts in heard])
    even = 256 * cfg.num_experts_per_tok / cfg.n_routed_experts
    print(counts)
    assert float(counts.min()) > even / 3
    assert float(counts.max()) < even * 3


def test_one_seed_gives_one_model():
    first, again, other = (dummy(preset("tiny"), fp8=False, seed=seed).state_dict() for seed in (1, 1, 2))
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
