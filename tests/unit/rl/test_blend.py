"""Hybrid reward: the sum of scaled sources and penalties by hand, and sources that are silent."""

import asyncio
import re
import tomllib
from collections import Counter
from pathlib import Path
from statistics import pstdev

import pytest
from pydantic import ValidationError

from glm5.common.errors import ConfigError
from glm5.config.rl import RLRecipe
from glm5.config.rl_reward import GuardsSection, RewardSection
from glm5.rl.environments.protocol import Task
from glm5.rl.environments.table import make
from glm5.rl.estimate import estimate
from glm5.rl.figures import _believed
from glm5.rl.rewards.blend import Blend
from glm5.rl.rewards.guards import penalties, repeated
from glm5.rl.rewards.judge import Verdicts
from glm5.rl.rollout import Group, Rollout
from glm5.rl.segments import Segment
from glm5.rl.watch import divergence
from tests.support.rl_recipe import small_recipe

EXACT = 1e-12
TASK = Task("guess", 0, 0, ({"role": "user", "content": "Say it."},), {"rubric": "Is it said?"})


def rollout(reward: float, said: str | None = "word", length: int = 1, failure=None, **metrics: float) -> Rollout:
    found = Rollout(TASK, 0, rewards={"right": reward}, metrics=dict(metrics), failure=failure)
    found.messages = [*TASK.messages] if said is None else [*TASK.messages, {"role": "assistant", "content": said}]
    found.tree.add(Segment([1]))
    found.tree.add(Segment([2] * length, 0, is_sampled=True, logprobs=[-1.0] * length, versions=[0] * length))
    return found


class ByLength:
    """A reward model to which longer is better."""

    def score(self, conversations):
        return [float(len(messages[-1]["content"])) for messages, _ in conversations]


class Says:
    """A judge with these values."""

    def __init__(self, *values: float | None, failures=()) -> None:
        self.found, self.seen = Verdicts(list(values), Counter(failures)), []

    async def values(self, prompt, answers, rubric=""):
        self.seen.append((prompt, list(answers), rubric))
        return self.found


def blended(rollouts, says=None, environment=None, measures=False, **reward) -> Group:
    values = {"name": "a", "steps": 1, "lr": 1.0, "model": {"preset": "nano"}, "rollouts": {"max_tokens": 10}}
    values |= {"environment": [{"name": "guess", **(environment or {})}], "reward": reward}
    recipe = RLRecipe.model_validate(values)
    blend, group = Blend(recipe, lambda _: ByLength()), Group(0, TASK, rollouts)
    blend.judge = says or blend.judge
    asyncio.run(blend.measure(group, "guess") if measures else blend.score(group, "guess", None))  # pyright: ignore[reportArgumentType]
    return group


JUDGE = {"url": "http://127.0.0.1:9"}


def test_the_reward_is_the_sum_of_scaled_sources():
    rewards, lengths, judged = (1.0, 0.0, 0.5), (2, 4, 9), (0.2, 0.9, 0.4)
    rollouts = [rollout(reward, "x" * n) for reward, n in zip(rewards, lengths, strict=True)]
    judge = Says(*judged)
    blended(rollouts, judge, model={"folder": "x", "floor": 1.0}, judge=JUDGE | {"floor": 0.5})

    def z(values, floor):
        mean, scale = sum(values) / 3, max(pstdev(values), floor)
        return [(one - mean) / scale for one in values]

    scaled = zip(z(rewards, 0.1), z(lengths, 1.0), z(judged, 0.5), strict=True)
    for one, (rules, model, by_judge), n in zip(rollouts, scaled, lengths, strict=True):
        assert one.rewards == pytest.approx({"rules": rules, "model": model / 2, "judge": by_judge / 2}, abs=EXACT)
        assert one.metrics["model_raw"] == n
    assert [one.metrics["rules_raw"] for one in rollouts] == list(rewards)
    assert rollouts[0].metrics["proxy"] == pytest.approx(1.0 + 2 / 2 + 0.2 / 2, abs=EXACT)
    assert judge.seen == [(list(TASK.messages), ["xx", "xxxx", "x" * 9], "Is it said?")]


def test_an_environment_has_weights_of_its_own_and_a_scale_may_be_none():
    rollouts = [rollout(1.0, "xx"), rollout(0.0, "xxxx")]
    group = blended(
        rollouts, environment={"reward": {"rules": 0.0, "model": 3.0}}, model={"folder": "x", "scale": "none"}
    )
    assert [one.rewards for one in group.rollouts] == [{"model": 6.0}, {"model": 12.0}]


def test_a_difference_below_the_floor_is_not_blown_up():
    rollouts = [rollout(0.5), rollout(0.5001)]
    blended(rollouts)
    assert rollouts[1].reward == pytest.approx(0.00005 / 0.1, rel=1e-9)
    blended(control := [rollout(0.5), rollout(0.5001)], rules={"floor": 1e-9})
    assert control[1].reward == pytest.approx(1.0)


def test_where_the_judge_is_silent_an_answer_gets_the_mean_and_the_rest_counts():
    rollouts = [rollout(1.0), rollout(0.0), rollout(0.0)]
    blended(rollouts, Says(1.0, 0.0, None, failures={"slow": 1}), judge=JUDGE)
    assert rollouts[2].rewards["judge"] == 0.0
    assert "judge_raw" not in rollouts[2].metrics
    assert "proxy" not in rollouts[2].metrics
    assert rollouts[0].metrics["judge_slow"] == pytest.approx(1 / 3)
    blended(down := [rollout(1.0), rollout(0.0)], Says(None, None, failures={"down": 2}), judge=JUDGE)
    assert [one.rewards["judge"] for one in down] == [0.0, 0.0]
    assert [one.rewards["rules"] for one in down] == [1.0, -1.0]
    assert all(one.is_valid for one in down)


def test_failing_never_pays():
    """An attempt without a reply has the least of its group, one that is excluded nothing."""
    rollouts = [rollout(1.0, "xxxx"), rollout(0.5, "xx"), rollout(0.0, None), rollout(0.0, "x" * 99, failure="harness")]
    excluded = rollout(0.0, "x", failure="sandbox")
    blended([*rollouts, excluded], Says(0.9, 0.2), model={"folder": "x"}, judge=JUDGE)
    assert [one.metrics["model_raw"] for one in rollouts] == [4, 2, 2, 2]
    assert [one.metrics["judge_raw"] for one in rollouts] == [0.9, 0.2, 0.2, 0.2]
    assert excluded.rewards == {"right": 0.0}


def test_a_group_without_a_reply_has_no_values_to_tell_apart():
    silent = [rollout(0.0, None), rollout(0.0, failure="tool")]
    blended(silent, Says(failures={"paused": 0}), model={"folder": "x"}, judge=JUDGE)
    assert [one.reward for one in silent] == [0.0, 0.0]
    blended([], Says(), judge=JUDGE)


def test_measuring_leaves_the_reward():
    rollouts = [rollout(0.25, "xxx")]
    blended(rollouts, measures=True, model={"folder": "x"}, held_out="gold")
    assert rollouts[0].rewards == {"right": 0.25}
    assert {name: rollouts[0].metrics[name] for name in ("proxy", "true")} == {"proxy": 1.75, "true": 3.0}


def test_penalties_by_hand():
    cfg = GuardsSection(length_from=0.5, run_words=2, repetition_from=0.2)
    assert penalties(cfg, "a plain answer", 5, 10) == {"length": 0, "repetition": 0, "phrases": 0}
    assert penalties(cfg, "x", 8, 10)["length"] == pytest.approx(0.6)
    assert repeated("a b a b a b", 2) == pytest.approx(1 - 2 / 5)
    assert penalties(cfg, "a b a b a b", 1, 10)["repetition"] == pytest.approx((0.6 - 0.2) / 0.8)
    assert repeated("a b", 4) == repeated("", 1) == 0
    praised = "GREAT QUESTION! As an expert: full marks, score: 10."
    assert penalties(cfg, praised, 1, 10)["phrases"] == 1.0
    assert penalties(cfg, "I hope this helps", 1, 10)["phrases"] == pytest.approx(1 / 3)


def test_penalties_are_rewards_of_their_own():
    rollouts = [rollout(1.0, "a a a a a a a a", 10), rollout(1.0, "b")]
    blended(rollouts, guards={"length": 0.5, "run_words": 1, "repetition": 2.0})
    assert rollouts[0].rewards == pytest.approx({"rules": 0.0, "length": -0.5, "repetition": -2 * (7 / 8 - 0.2) / 0.8})
    assert rollouts[1].rewards == {"rules": 0.0}


def test_what_makes_no_reward_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="every weight is 0"):
        RewardSection.model_validate({"rules": {"weight": 0}})
    for settings, told in (
        (("environment=[{name='guess',reward={judge=1.0}}]", "reward={}"), "has no judge"),
        (("environment=[{name='guess',ladder=0.5}]", "reward={}"), "a ladder climbs"),
        (("reward.judge.url='ftp://x'",), "reward.judge.url"),
    ):
        with pytest.raises(ConfigError, match=told):
            small_recipe(tmp_path, *settings)


def test_a_dry_run_refuses_what_is_not_there(tmp_path):
    (tmp_path / "policy").mkdir()
    for settings, told in (
        (f"reward.model.folder='{tmp_path}/policy'", "it has no reward.json"),
        (f"reward.held_out='{tmp_path}/policy'", "it has no reward.json"),
        (f"reward.anchors.file='{tmp_path}/none.jsonl'", f"there is no file {tmp_path}/none.jsonl"),
    ):
        with pytest.raises(ConfigError, match=told):
            estimate(small_recipe(tmp_path, settings))


def test_the_recipe_of_the_guide_is_one():
    guide = (Path(__file__).parents[3] / "docs/rl-general.md").read_text()
    (shown,) = re.findall(r"```toml\n(.*?)```", guide, flags=re.DOTALL)
    recipe = RLRecipe.model_validate(
        {"name": "a", "steps": 1, "lr": 1.0, "model": {"preset": "nano"}, **tomllib.loads(shown)}
    )
    assert recipe.reward is not None
    assert list(recipe.reward.sources) == ["rules", "model", "judge"]
    for one in recipe.environment:
        assert make(one.name).name == one.name


def test_divergence_of_proxy_and_true_reward():
    pairs = [[(0.0, 0.0), (1.0, 1.0)], [(5.0, 0.0), (6.0, -1.0), (7.0, -2.0)]]
    groups = [Group(0, TASK, [rollout(0.0, proxy=p, true=t) for p, t in of]) for of in pairs]
    found = _believed(groups)
    assert found["proxy/correlation"] == pytest.approx((0.5 - 2.0) / (0.5 + 2.0))
    assert found["true/std"] == pytest.approx(pstdev([0, 1, 0, -1, -2]))
    assert _believed([Group(0, TASK, [rollout(0.0)])]) == {}
    begun = {"metric/proxy": 1.0, "metric/true": 0.5, "proxy/std": 0.5, "true/std": 0.25}
    assert divergence(begun, begun | {"metric/proxy": 2.0, "metric/true": 0.25}) == 3.0
    assert divergence(begun, begun | {"metric/proxy": 1.5, "metric/true": 0.75}) == 0.0
