"""The task with a hidden true reward: its rewards by hand, and what people prefer."""

from random import Random

import pytest

from glm5.bench.hybrid.compare import ARMS, CLAIMED, judge_table, recipe_of, table
from glm5.bench.hybrid.task import MOST_WORDS, WORDS, Comfort, compared, scored
from glm5.config.bench_hybrid import BenchHybridConfig
from glm5.rl.environments.play import play_oracle, play_randomly

TASK = Comfort().task(0, 0)  # sad 828


@pytest.mark.parametrize(
    ("said", "content", "true"),
    [
        *(("sorry 288", 1.0, 1.0), ("288", 1.0, 0.5), ("sorry 828", 1 / 3, 2 / 3), ("great 288", 1.0, 0.5)),
        *(("sorry great calm 288", 1.0, 0.75), ("sorry " * 7, 0.0, 0.0), ("", 0.0, 0.0), ("288 sorry", 0.0, 0.5)),
    ],
)
def test_rewards_by_hand(said, content, true):
    assert TASK.messages[0]["content"] == "sad 828"
    turn = scored(TASK, said)
    assert turn.rewards["content"] == pytest.approx(content)
    assert turn.metrics["true"] == pytest.approx(true)


def test_tasks_differ_and_oracles_are_the_optimum():
    environment, random = Comfort(), Random(3)
    assert len({environment.task(seed, 0).key for seed in range(3000)}) == 3000
    for seed in range(50):
        task = environment.task(seed, 0)
        assert play_oracle(environment, task).last.metrics["true"] == 1.0
        assert play_randomly(environment, task, random).last.metrics["kind_words"] <= MOST_WORDS


def test_people_prefer_the_warmer_of_two_equal_answers_and_no_more():
    print("seed 4")
    random = Random(4)
    others = [word for word in WORDS.values() if word != "sorry"]
    shares = [
        sum(Comfort().prefers(TASK, *pair, random) for _ in range(2000)) / 2000
        for pair in ((f"{others[0]} 288", "288"), ("sorry 288", f"{others[0]} {others[1]} 288"), ("288", "288"))
    ]
    # sigmoid(8 * 0.1), sigmoid(8 * (0.5 - 0.1)) and 1/2, within 4 standard deviations of 2,000 draws
    assert shares == pytest.approx([0.690, 0.961, 0.5], abs=0.045)
    chosen, rejected = compared(0, 1, 0)[0]
    assert chosen[0] == rejected[0] == TASK.messages[0]


def test_arms_are_recipes_and_the_tables_have_their_rows(tmp_path):
    settings = BenchHybridConfig(out=str(tmp_path))
    recipes = {arm: recipe_of(settings, arm, 1, tmp_path / "run") for arm in ARMS}
    weights = {
        arm: tuple(source.weight > 1e-6 for source in one.reward.sources.values())
        for arm, one in recipes.items()
        if one.reward is not None
    }
    assert [weights[arm] for arm in CLAIMED] == [(True, True), (True, False), (False, True)]
    line = {"arm": "hybrid", "held_out": [{"proxy": 0.0, "true": 0.2}, {"proxy": 1.0, "true": 0.9}]}
    shown = table([line, line | {"held_out": [{"proxy": 0.0, "true": 0.4}] * 2}])
    assert "| hybrid | 0.00 ± 0.00 | 0.50 ± 0.71 | 0.30 ± 0.14 | 0.65 ± 0.35 | 0.65 ± 0.35 |" in shown
    assert "| right | 0.75 ± 0.00 |" in judge_table([{"arm": "judge", "judge": {"right": 0.75}}])
