"""Mixtures realise their weights, ladders move at their bounds."""

from collections import Counter
from random import Random

import pytest

from glm5.common.errors import ConfigError
from glm5.rl.environments.ladder import WINDOW, Ladder
from glm5.rl.environments.mixture import Mixture

MAX_ERROR = 0.01


def shares(mixture, start, num_draws):
    drawn = Counter(mixture.draw(start + number) for number in range(num_draws))
    return {key: count / num_draws for key, count in drawn.items()}


def test_weights_are_realised_within_1_percent_anywhere_in_a_run():
    wanted = {"math": 1.5, "science": 0.5, "code": 1, "tools": 1, "search": 0.5}
    mixture = Mixture(wanted)
    worst = {}
    for num_draws in (300, 1000, 10_000):
        for start in (0, 12_345):
            got = shares(mixture, start, num_draws)
            assert got.keys() == wanted.keys()
            worst[num_draws, start] = max(abs(got[key] - weight / 4.5) for key, weight in wanted.items())
    print(worst)
    assert max(worst.values()) < MAX_ERROR
    # Control: random draws miss it.
    random = Random(0)
    drawn = Counter(random.choices([0, 1, 2, 3], [2, 1, 1, 0.5], k=300))
    assert max(abs(drawn[i] / 300 - weight / 4.5) for i, weight in enumerate([2, 1, 1, 0.5])) > MAX_ERROR


def test_a_draw_depends_on_its_number_alone():
    one, other = Mixture({"a": 1, "b": 2}), Mixture({"a": 1, "b": 2})
    assert [one.draw(number) for number in range(50)] == [other.draw(number) for number in reversed(range(50))][::-1]


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": float("nan")}])
def test_wrong_mixtures_are_named(weights):
    with pytest.raises(ConfigError, match="above 0"):
        Mixture(weights)


def test_a_ladder_moves_at_its_bound_and_goes_on_from_its_state():
    ladder = Ladder(3, up=0.75)

    def add(*rewards):
        for reward in rewards:
            ladder.add(ladder.level, reward)
        return ladder.level

    assert add(*[1] * (WINDOW - 1)) == 0
    assert add(1) == 1
    assert add(1) == 1  # a level begins with no rewards
    ladder.add(0, 1.0)  # late, of the level before
    assert add(*[0] * WINDOW) == 1
    assert add(*[1] * (WINDOW * 3 // 4 - 1)) == 1  # one below the bound
    again = Ladder(3, up=0.75)
    again.load_state_dict(ladder.state_dict())
    again.add(1, 1)
    assert add(1) == again.level == 2
    assert add(*[1] * 2 * WINDOW) == 2  # the highest
    assert add(*[0] * 2 * WINDOW) == 2  # never down
