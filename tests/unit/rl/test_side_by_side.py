"""Runs beside each other: times to equal reward and shares of time, by hand."""

import json

import pytest

from tests.support.side_by_side import compare


def line(step, seconds, reward, trained):
    every = {"time/push": 0.0, "perf/train_tok_s": 10.0, "perf/rollout_tok_s": 5.0, "staleness/mean": 1.0}
    every |= {"staleness/max": 2.0, "wait/engines": 0.25, "wait/environment": 0.5, "reward/std": 0.1}
    every |= {"staleness/dropped": 1.0, "staleness/checked": 4.0}
    return {
        "step": step,
        "time/step": seconds,
        "time/train": trained,
        "reward/mean": reward,
        "reward/a": reward,
        **every,
    }


def test_time_to_equal_reward_and_shares(tmp_path):
    rewards = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0]
    for name, seconds, count in [("fast", 1.0, 10), ("slow", 4.0, 8)]:
        lines = [line(number + 1, seconds, rewards[number], 0.5) for number in range(count)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = compare([tmp_path / "fast", tmp_path / "slow"], 10.0)
    # The last five steps of slow: 0.6 to 1.0, mean 0.88; 95 % of it is 0.836, which the mean of steps 4 to 8 reaches.
    for name, at in [("fast", 8.0), ("slow", 32.0)]:
        reward = found[name]["rewards"]["reward/mean"]
        assert reward["goal"] == pytest.approx(0.836)
        assert reward["seconds to goal"] == at
        assert found[name]["rewards"].keys() == {"reward/mean", "reward/a"}
    # Steps of slow end at 4, 8, ..., 32 s: at 10, 20, 30 and 40 s steps 2, 5, 7 and 8 are the last.
    assert found["slow"]["rewards"]["reward/a"]["curve"] == pytest.approx([0.1, 0.4, 0.76, 0.88])
    assert found["fast"]["figures"]["trainer busy, share"] == pytest.approx(0.5)
    assert found["slow"]["figures"]["trainer busy, share"] == pytest.approx(0.125)
    assert found["slow"]["figures"]["engine busy, share"] == pytest.approx(0.75)
    assert found["slow"]["figures"]["dropped as stale, share of episodes"] == pytest.approx(0.25)
