"""Largest attention logits against the formula; updates of every matrix at one size."""

import pytest
import torch

from glm5.config.model import ModelConfig
from glm5.config.step import LossConfig, OptimizerConfig
from glm5.kernels.sparse_mla import sparse_mla
from glm5.model import Glm5
from glm5.train.batch import Batch
from glm5.train.optim.build import Optimizers
from glm5.train.step import Phase, Step
from glm5.train.telemetry import attention_logits, update_rms
from tests.support.parity import BASE, randomize

LENGTHS = [21, 1, 18]
CLOSE = 1e-5  # float32 on both sides


@pytest.fixture(scope="module")
def model() -> Glm5:
    model = Glm5(ModelConfig.from_dict(BASE | {"num_nextn_predict_layers": 0, "index_topk": 8}))
    randomize(model, seed=3)
    return model


@pytest.fixture(scope="module")
def batch() -> Batch:
    ids = torch.randint(2, BASE["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return Batch(ids, torch.ones(len(ids)), LENGTHS)


def spy(largest: dict[int, torch.Tensor]):
    """sparse_mla that notes, query by query, the largest logit of each head."""

    def noting(q_THL, pool, keys, table, row, end, *, scale, value_dim):
        each = []
        for t in range(len(q_THL)):
            chosen = range(int(end[t])) if keys is None else [k for k in keys[t].tolist() if 0 <= k < end[t]]
            latents = pool[int(table[int(row[t]), 0])][list(chosen)]
            each.append((q_THL[t] @ latents.T * scale).amax(dim=1))
        largest[len(largest)] = torch.stack(each).amax(dim=0)
        return sparse_mla(q_THL, pool, keys, table, row, end, scale=scale, value_dim=value_dim)

    return noting


@pytest.mark.parametrize("keys", ["sparse", "dense"])
def test_largest_logits_are_those_of_a_loop(keys, model, batch, monkeypatch):
    want: dict[int, torch.Tensor] = {}
    monkeypatch.setattr("glm5.model.packed.sparse_mla", spy(want))
    got = attention_logits(model, batch, Phase(keys))
    assert got.keys() == want.keys() == set(range(model.cfg.num_hidden_layers))
    for layer_idx, heads in got.items():
        assert heads == pytest.approx(want[layer_idx].tolist(), rel=CLOSE)


def test_every_matrix_moves_by_the_same_size(model, batch):
    optimizers = Optimizers(dict(model.named_parameters()), model.cfg, OptimizerConfig())
    assert update_rms(optimizers) == {}
    optimizers.muon.watch = True
    Step(model, optimizers, LossConfig(), Phase("sparse", learn_index=True)).run([batch], 1e-3)
    sizes = update_rms(optimizers)
    assert sizes.keys() == {name for name, state in optimizers.state_dict().items() if "momentum" in state}
    experts = [size for name, size in sizes.items() if ".experts." in name]
    rest = [size for name, size in sizes.items() if ".experts." not in name]
    assert min(rest) > 0.12
    assert max(rest) < 0.22
    assert max(experts) < 0.22  # experts without tokens stay where they are
