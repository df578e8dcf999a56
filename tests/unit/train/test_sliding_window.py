"""Sliding windows: what they read is what a mask says, layer by layer, and the search finds the layers that matter."""

import pytest
import torch

from glm5.config.presets import preset
from glm5.config.step import WindowConfig
from glm5.config.train import StageConfig
from glm5.model.packed import PackedView
from glm5.model.seams import Selection
from glm5.train.batch import Batch
from glm5.train.sliding_window import WindowView, keys_read, search_pattern
from glm5.train.stages import phase_of
from tests.support.models import random_model
from tests.support.training import recipe, stage

LENGTHS = [21, 5, 1, 30]
SIZE = 6


def stage_of(**values) -> StageConfig:
    given = {"name": "x", "kind": "midtrain", "steps": 1, "seq_len": 64, "sequences": 1, "lr": 1e-3}
    return StageConfig.model_validate(given | {"data": [{"kind": "needle"}]} | values)


class Masked(PackedView):
    """The same by a table of what each token sees: [T, longest], position by position."""

    def __init__(self, pattern: str, lengths: list[int]) -> None:
        super().__init__(lengths, stage="dense")
        self.pattern = pattern

    def attend(self, layer_idx, q_THL, selection, *, scale, value_dim):
        rows = [
            [s for s in range(position + 1) if self.pattern[layer_idx] == "F" or s > position - SIZE]
            for position in self.positions_T.tolist()
        ]
        keys_TK = torch.tensor([row + [-1] * (self.max_len - len(row)) for row in rows], dtype=torch.int32)
        return super().attend(layer_idx, q_THL, Selection(keys_TK), scale=scale, value_dim=value_dim)


@pytest.mark.parametrize("pattern", ["SFSF", "S", "FFFS"])
def test_a_window_reads_what_a_mask_would(pattern, seed):
    model = random_model(seed, preset("tiny"), torch.float64)
    ids_T = torch.randint(0, 320, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    got = model(ids_T, WindowView(WindowConfig(size=SIZE, pattern=pattern), LENGTHS))
    want = model(ids_T, Masked((pattern * 4)[:4], LENGTHS))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    wider = model(ids_T, WindowView(WindowConfig(size=SIZE + 1, pattern=pattern), LENGTHS))
    assert (wider - want).abs().max() > 1e-3, "one key more shows"


def test_a_window_as_long_as_the_sequence_is_dense_attention(seed):
    model = random_model(seed, preset("tiny"), torch.float64)
    ids_T = torch.arange(sum(LENGTHS))
    got = model(ids_T, WindowView(WindowConfig(size=max(LENGTHS), pattern="S"), LENGTHS))
    assert torch.equal(got, model(ids_T, PackedView(LENGTHS, stage="dense")))


def test_a_window_takes_no_more_than_its_sequences():
    WindowView(WindowConfig(size=2**31 - 1), LENGTHS)  # as a table it would be of terabytes
    with pytest.raises(ValueError, match=r"size\n.* less than or equal to 2147483647"):
        WindowConfig(size=10**20)


def test_a_stage_with_windows_trains_the_trunk_through_them(seed):
    phase = phase_of(stage_of(window={"size": SIZE, "pattern": "S"}))
    model = random_model(seed, preset("tiny"))
    batch = Batch(torch.arange(40), torch.ones(40), [40])
    view = phase.view(batch, learning=True)
    model(batch.ids_T, view).square().sum().backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    assert grads["model.layers.3.self_attn.kv_b_proj.weight"].abs().max() > 0
    assert all(grad is None for name, grad in grads.items() if ".indexer." in name)


@pytest.mark.parametrize("values", [{"kind": "warmup"}, {"kind": "sparse"}, {"kind": "pretrain", "keys": "sparse"}])
def test_windows_take_the_place_of_dense_attention_only(values):
    with pytest.raises(ValueError, match="say keys = dense"):
        stage_of(window={"size": 4}, **values)
    assert stage_of(window={"size": 4}, kind="sft", keys="dense").window is not None


def test_a_recipe_can_say_it(tmp_path):
    found = recipe(tmp_path, "out", stage("swa", window='{size = 16, pattern = "SFF"}'))
    assert found.stage[0].window == WindowConfig(size=16, pattern="SFF")


def test_the_share_of_keys_is_that_of_pairs_read():
    pairs = sum(min(t, 4) for t in range(1, 11)), sum(range(1, 11))
    assert keys_read(WindowConfig(size=4, pattern="S"), 3, 10) == pytest.approx(pairs[0] / pairs[1])
    assert keys_read(WindowConfig(size=4, pattern="SF"), 4, 10) == pytest.approx((pairs[0] / pairs[1] + 1) / 2)


def test_the_search_keeps_the_layers_that_matter():
    needed = {1: 3.0, 4: 2.0, 6: 1.0}  # what is lost when one of these becomes a window

    def loss(pattern: str) -> float:
        return sum(needed.get(layer, 0.01 * layer) for layer, kind in enumerate(pattern) if kind == "S")

    best, tried = search_pattern(loss, 8, 5)
    assert best == "SFSSFSFS"
    assert tried[best] == min(loss for pattern, loss in tried.items() if pattern.count("S") == 5)
    assert {pattern.count("S") for pattern in tried} == {2, 4, 5}
    with pytest.raises(ValueError, match="num_windows: got 8; allowed: 1 to 7"):
        search_pattern(loss, 8, 8)
