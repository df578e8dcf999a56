"""Attention recall against the formula; random indexers keep about what they select."""

import pytest
import torch

from glm5.config.presets import preset
from glm5.kernels.attention_target import head_mean_probs
from glm5.model import Glm5
from glm5.model.init import init_weights
from glm5.model.packed import PackedView
from glm5.train.attention_recall import RecallView, attention_recall
from glm5.train.batch import Batch

EXACT = 1e-5  # float32 sums of 40 probabilities


@pytest.fixture(scope="module")
def model():
    return init_weights(Glm5(preset("tiny").replace(dtype="float32")).float(), seed=0).eval()


def batch(lengths):
    ids_T = torch.arange(sum(lengths)) * 7 % 300
    return Batch(ids_T, torch.ones(len(ids_T)), lengths)


def test_the_pass_is_the_dense_one(model):
    given = batch([40, 9])
    with torch.no_grad():
        dense = model(given.ids_T, PackedView(given.lengths, stage="dense"))
        assert torch.equal(model(given.ids_T, RecallView(given.lengths)), dense)


def test_what_is_kept_is_the_attention_of_selected_keys(model, monkeypatch):
    """All keys: 1. With every probability 1 / keys, top_k / keys."""
    given = batch([40])
    recall = attention_recall(model, [given])
    keys = torch.arange(9, 41)
    expected = (8 / keys).mean().item()
    assert recall == pytest.approx(expected, rel=0.1), "attention of random weights is nearly even"
    assert attention_recall(model, [batch([8, 5])]) is None

    def all_of_it(q_THL, latent_PZL, keys_TK, lse_TH, *where, scale):
        return head_mean_probs(q_THL, latent_PZL, None, lse_TH, *where, scale=scale)

    monkeypatch.setattr("glm5.train.attention_recall.head_mean_probs", all_of_it)
    assert attention_recall(model, [given]) == pytest.approx(1.0, abs=EXACT)
