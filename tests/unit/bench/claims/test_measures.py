"""What rows measure, on small cases whose answer is known."""

from pathlib import Path

import pytest
import torch

from glm5.bench.claims import small_policy as small
from glm5.bench.claims.policies import SWAPPED, policy, swapped
from glm5.bench.claims.trainings import _LogitView, export
from glm5.common.errors import ConfigError
from glm5.config.presets import preset
from glm5.model.glm5 import Glm5
from glm5.model.init import init_weights
from tests.support.rl_recipe import recipe_file

HERE = Path()


def learnt(*settings: str, seed: int = 0) -> dict[str, float]:
    return small.small_policy(None, settings, seed, HERE)


def test_the_small_policy_learns_and_repeats_itself(monkeypatch):
    monkeypatch.setattr(small, "HELD_OUT", 300)
    monkeypatch.setattr(small, "STEPS", 15)
    first = learnt("lr=1e-2")
    assert first == learnt("lr=1e-2")
    assert first["reward"] > 0.15  # 0.1 by chance
    monkeypatch.setattr(small, "STEPS", 1)
    assert learnt("lr=1e-2")["reward"] < 0.13


def test_what_is_planted_changes_the_run(monkeypatch):
    monkeypatch.setattr(small, "HELD_OUT", 300)
    monkeypatch.setattr(small, "STEPS", 4)
    plain = learnt()
    settings = [
        "bits=fp8",
        "bits=int4",
        "noise=0.3",
        "staleness=2",
        "fail=0.3",
        "kl=0.1",
        "algorithm=dis",
        "reset=true",
    ]
    found = [learnt(one)["reward"] for one in settings]
    assert len({plain["reward"], *found}) == 1 + len(settings)


def test_a_wrong_algorithm_is_refused():
    with pytest.raises(ConfigError, match="unknown algorithm"):
        learnt("algorithm=grop")


def test_failures_are_left_out_and_their_groups_filled():
    fails_N = torch.zeros(small.GROUPS * small.SIZE, dtype=torch.bool)
    fails_N[:3] = True  # 13 of 16 are valid
    fails_N[small.SIZE : small.SIZE + 8] = True  # exactly half: dropped
    kept_N, copies_N = small._repaired(torch.zeros(len(fails_N)), fails_N)
    of_group = copies_N.view(small.GROUPS, small.SIZE)
    assert of_group.sum(1).tolist() == [16, 0, *[16] * (small.GROUPS - 2)]
    assert of_group[0].tolist() == [0, 0, 0, 2, 2, 2, *[1] * 10]
    assert torch.equal(kept_N, copies_N > 0)


def test_swapped_keys_are_visible_and_different():
    torch.manual_seed(0)
    end_T = torch.arange(1, 41)
    keys_TK = torch.stack(
        [torch.cat([torch.arange(max(0, end - 8), end), -torch.ones(max(0, 8 - end))]) for end in end_T]
    )
    new_TK = swapped(keys_TK.int(), end_T)
    for end, row in zip(end_T.tolist(), new_TK.tolist(), strict=True):
        some = [key for key in row if key >= 0]
        assert some == sorted(set(some))
        assert row == some + [-1] * (8 - len(some))
        assert all(key < end for key in some)
    stay = (new_TK[8:, :, None] == keys_TK[8:, None, :]).any(1).double().mean().item()
    assert 1 - SWAPPED - 0.1 < stay < 1


def test_the_largest_logit_grows_with_the_queries():
    cfg = preset("tiny", 1)
    model = Glm5(cfg)
    init_weights(model, 0)
    ids_T = torch.arange(20) % cfg.vocab_size

    def logit() -> float:
        view = _LogitView([10, 10], stage="dense")
        with torch.no_grad():
            model(ids_T, view)
        return view.largest

    before = logit()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_b_proj.weight *= 3
    assert logit() == pytest.approx(3 * before, rel=1e-5)


def test_training_and_export_are_equal():
    assert export(None, (), 0, HERE) == {"differ": 0.0}


@pytest.mark.long
@pytest.mark.parametrize(("mark", "is_exact"), [("keys", True), ("unstable-keys", False)])
def test_a_policy_on_selected_keys(tmp_path, mark, is_exact):
    """The trainer reads the engine's keys, or planted others, which its log-probabilities show."""
    (tmp_path / "work").mkdir()
    few = ("steps=2", "exact=false", "model.config.index_topk=16", mark)
    found = policy(str(recipe_file(tmp_path)), few, 0, tmp_path / "work")
    assert (found["mismatch"] < 1e-6) == is_exact
    assert 0 <= found["reward"] <= 1
