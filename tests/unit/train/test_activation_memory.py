"""Activations computed again, or kept in host memory: the same losses and gradients, and less memory."""

import pytest
import torch
from torch import Tensor

from glm5.config.model import ModelConfig
from glm5.config.step import LossConfig, OptimizerConfig
from glm5.model import Glm5
from glm5.train import activation_memory
from glm5.train.activation_memory import set_activation_memory
from glm5.train.batch import Batch
from glm5.train.optim.build import Optimizers
from glm5.train.step import Phase, Step
from tests.support.parity import BASE, randomize
from tests.support.peak import peak_bytes

CONFIG = BASE | {"num_nextn_predict_layers": 1, "index_topk_pattern": "FSFF", "index_topk": 8}
WAYS = [("mlp", False), ("layer", False), (None, True), ("layer", True)]


class Kept(Optimizers):
    """Keeps the gradients of a step, and updates nothing."""

    def step(self, lr: float) -> None:
        self.grads = {name: one.grad.clone() for name, one in self.named.items() if one.grad is not None}


def model() -> Glm5:
    made = Glm5(ModelConfig.from_dict(CONFIG))
    randomize(made, seed=3)
    return made


def ran(phase: Phase, recompute, *, offload: bool) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, gradients and biases after a step."""
    of = model()
    set_activation_memory(of, recompute, offload=offload)
    batch = Batch(torch.arange(2, 48), torch.ones(46), [19, 1, 26])
    kept = Kept(dict(of.named_parameters()), of.cfg, OptimizerConfig())
    metrics = Step(of, kept, LossConfig(mtp_depth=2), phase).run([batch], 0.0)
    return metrics, kept.grads, dict(of.named_buffers())


@pytest.mark.parametrize("phase", [Phase("dense"), Phase("sparse", learn_index=True)], ids=["dense", "sparse"])
def test_losses_gradients_and_counts_stay_the_same(phase, monkeypatch):
    monkeypatch.setattr(activation_memory, "_MIN_OFFLOAD", 16)
    want = ran(phase, None, offload=False)
    for recompute, offload in WAYS:
        got = ran(phase, recompute, offload=offload)
        assert got[0] == want[0]
        for own, theirs in zip(got[1:], want[1:], strict=True):
            assert own.keys() == theirs.keys()
            assert all(torch.equal(own[name], theirs[name]) for name in own)


def test_less_is_kept():
    """Of 300 tokens, between forward and backward; what lies in host memory cannot be told apart here."""

    def held(recompute) -> int:
        of = model()
        set_activation_memory(of, recompute, offload=False)
        batch = Batch(torch.arange(300) % 60 + 2, torch.ones(300), [300])
        with peak_bytes() as peak:
            of(batch.ids_T, Phase("dense").view(batch)).sum().backward()
        return peak.at_most

    plain, mlp, layer = held(None), held("mlp"), held("layer")
    print(f"{plain} bytes at most, {mlp} with MLPs computed again, {layer} with layers")
    assert layer < 0.8 * mlp < 0.8 * plain
