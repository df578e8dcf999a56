import json

import pytest
import torch

from glm5.checkpoint.save import save
from glm5.common.errors import CheckpointError, ConfigError
from glm5.config.presets import preset
from glm5.model.packed import PackedView
from glm5.train.reward_model import FILE, RewardModel
from tests.support.models import random_model

ROUNDING = 1e-5  # float32, sums in another order: 3e-7 measured
SEQUENCES = [[5, 6, 7, 8, 9, 10], [11, 12], [5, 6, 7], [3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = random_model(3, preset("tiny").replace(value_head=True))
    return save(model, tmp_path_factory.mktemp("reward") / "model")


def test_scores_are_the_head_at_the_last_token_over_the_temperature(folder):
    plain = RewardModel.load(folder)
    (folder / FILE).write_text(json.dumps({"temperature": 2.5, "num_pairs": 10, "keys": "sparse"}))
    calibrated = RewardModel.load(folder, device="cpu")
    model = plain.model
    expected = [
        model.value_head(model(torch.tensor(ids), PackedView([len(ids)], model.device)))[-1].item() for ids in SEQUENCES
    ]
    scores = plain.score(SEQUENCES)
    assert scores == pytest.approx(expected, abs=ROUNDING)
    assert len({round(score, 3) for score in scores}) == len(SEQUENCES)  # else the comparison would say nothing
    assert calibrated.score(SEQUENCES) == pytest.approx([score / 2.5 for score in scores], rel=1e-6)
    assert plain.score(SEQUENCES) == scores
    small = RewardModel(model, plain.calibration, pass_tokens=4)
    assert small.score(SEQUENCES) == pytest.approx(scores, abs=ROUNDING)
    assert plain.score([]) == []


@pytest.mark.parametrize("ids", [[], [-1], [10**6]])
def test_bad_sequences_are_refused_by_number(folder, ids):
    with pytest.raises(ConfigError, match="sequence 1 to score"):
        RewardModel.load(folder).score([[1], ids])


def test_a_folder_that_is_no_reward_model(folder, tmp_path):
    with pytest.raises(CheckpointError, match="no value head"):
        RewardModel.load(save(random_model(3), tmp_path / "plain"))
    for wrong in ('{"temperature": 0}', '{"temperature": NaN}', "[", '{"temperatur": 1}'):
        (folder / FILE).write_text(wrong)
        with pytest.raises(CheckpointError, match=r"reward\.json is damaged"):
            RewardModel.load(folder)


def test_a_head_of_no_numbers_has_no_score(tmp_path):
    model = random_model(3, preset("tiny").replace(value_head=True))
    with torch.no_grad():
        model.value_head.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="a score of the reward model is not finite"):
        RewardModel.load(save(model, tmp_path / "damaged")).score([[1, 2]])
