"""Passes as graphs: what is replayed over rounded shapes is what a pass computes. (Graphs run eagerly here.)"""

import numpy as np
import pytest
import torch

from glm5.config.presets import preset
from glm5.engine import arithmetic
from glm5.rl.training import captured_pass
from glm5.rl.training.engine_pass import EnginePass
from glm5.rl.training.prefixes import Prefixes
from tests.support.models import random_model


class EagerGraphs:
    """In place of `Graphs`: a piece runs again where a graph would be replayed."""

    def __init__(self, _passes, _cache, *, captures: bool):
        assert captures
        self.keys, self.num_runs = set(), 0

    def forget_if_moved(self):
        pass

    def has(self, key):
        return key in self.keys

    def capture(self, key, piece, *, warm: bool):
        assert warm
        self.keys.add(key)
        piece()

    def run(self, _key, piece):
        self.num_runs += 1
        piece()


def batches(rng, longest: int):
    """Groups that share a prompt: three sizes twice, of which the first needs the most pages."""
    sizes = [rng.integers(12, longest - shorter, 7 - shorter).tolist() for shorter in (0, 1, 2)]
    for lengths in (*sizes, *sizes):
        stem = rng.integers(0, 50, 10)
        ids = np.concatenate([np.concatenate([stem, rng.integers(0, 50, length - 10)]) for length in lengths])
        yield torch.from_numpy(ids), lengths


@pytest.mark.parametrize("longest", [20, 90])  # below and beyond index_topk
def test_a_replayed_pass_is_the_pass(longest, seed, monkeypatch):
    monkeypatch.setattr(captured_pass, "Graphs", EagerGraphs)
    model = random_model(seed % 1000, preset("nano"))
    plain, captured = EnginePass(model), EnginePass(model)
    captured._captures = True
    for ids_T, lengths in batches(np.random.default_rng(seed), longest):
        prefixes = Prefixes.of(ids_T.numpy(), lengths)
        want, got = (one.run(ids_T, lengths, prefixes) for one in (plain, captured))
        assert torch.equal(got.stream_LUD, want.stream_LUD)
        assert torch.equal(got.hidden_UD, want.hidden_UD)
        assert torch.equal(got.expert_ULA, want.expert_ULA)
        assert all(keys is None for keys in got.keys) == (max(lengths) <= model.cfg.index_topk)
    assert captured._captured._graphs.num_runs


def test_a_model_without_experts_in_several_passes(seed, monkeypatch):
    monkeypatch.setattr(arithmetic, "use_native", lambda _model, **_: False)
    cfg = preset("nano").replace(first_k_dense_replace=preset("nano").num_hidden_layers)
    trained = EnginePass(random_model(seed % 1000, cfg))
    ids_T, lengths = torch.arange(60) % 50, [40, 20]
    trace = trained.run(ids_T, lengths, Prefixes.of(ids_T.numpy(), lengths))
    assert len(trace.expert_ULA) == len(trace.hidden_UD)
