"""Kuhn poker: the game's value, the equilibria, and exploitability against numbers found by hand."""

import itertools
import math
from random import Random

import pytest

from glm5.rl.environments.kuhn import ACTIONS
from glm5.rl.environments.play import play, play_oracle, play_randomly
from glm5.rl.environments.protocol import Reply
from glm5.rl.environments.table import make
from glm5.rl.records.store import RecordWriter
from glm5.rl.rollout import Group, Rollout
from glm5.rl.segments import Segment
from tests.support.kuhn_curve import (
    GAME_VALUE,
    INFORMATION_SETS,
    average,
    conversation,
    nash_conv,
    policies,
    value,
)

KUHN = make("kuhn")


def equilibrium(alpha):
    """Kuhn 1950: one for every alpha from 0 to 1/3, the probability that seat 0 bets with a jack."""
    bets_0 = {"J": alpha, "Q": 0.0, "K": 3 * alpha, "Jpb": 0.0, "Qpb": alpha + 1 / 3, "Kpb": 1.0}
    return bets_0 | {"Jp": 1 / 3, "Qp": 0.0, "Kp": 1.0, "Jb": 0.0, "Qb": 1 / 3, "Kb": 1.0}


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_equilibria_have_the_games_value_and_cannot_be_exploited(alpha):
    policy = equilibrium(alpha)
    assert policy.keys() == set(INFORMATION_SETS)
    assert value(policy, policy) == pytest.approx(GAME_VALUE, abs=1e-12)
    assert nash_conv(policy) == pytest.approx(0.0, abs=1e-12)
    # Controls: a policy that is near an equilibrium, or is none, can be exploited.
    assert nash_conv(policy | {"Qb": 0.4}) > 0.01
    assert nash_conv(equilibrium(0.5) | {"K": 1.0}) > 0.05


def test_nash_conv_of_simple_policies():
    always, never, random = (dict.fromkeys(INFORMATION_SETS, bet) for bet in (1.0, 0.0, 0.5))
    # Against bets: fold J, call K, and of Q it does not matter: (-1 + 2) / 3 for seat 1, and for seat 0 the same.
    assert nash_conv(always) == pytest.approx(2 / 3)
    # Against passes: bet, and win 1 always.
    assert nash_conv(never) == pytest.approx(2.0)
    assert nash_conv(random) == pytest.approx(11 / 12)


def play_with(policy, seed, random):
    def reply(chat):
        known = next(each for each in INFORMATION_SETS if conversation(each) == chat)
        return Reply("bet" if random.random() < policy[known] else "pass")

    return play(KUHN, KUHN.task(seed, 0), reply)


def test_every_line_of_play_pays_what_the_tree_says():
    """The episodes against `value`, for all pure policies that matter: sampled ones."""
    random = Random(5)
    print("seed 5")
    for _ in range(20):
        policy = {each: float(random.random() < 0.5) for each in INFORMATION_SETS}
        games = [play_with(policy, seed, random) for seed in range(6)]
        assert sum(game.rewards[0] for game in games) / 6 == pytest.approx(value(policy, policy), abs=1e-12)
        assert all(sum(game.rewards) == 0 for game in games)


def test_a_seat_does_not_see_the_other_card():
    for seed in range(6):
        deal = KUHN.task(seed, 0).data["deal"]
        for said in itertools.product(ACTIONS, repeat=3):
            replies = iter(said)
            game = play(KUHN, KUHN.task(seed, 0), lambda _, replies=replies: Reply(next(replies)))
            for seat, chat in enumerate(game.conversations):
                text = " ".join(message["content"] for message in chat)
                assert deal[seat] in text
                assert deal[1 - seat] not in text


def test_an_illegal_reply_costs_its_seat_alone_and_oracles_see_both_cards():
    for said, rewards in ((["fold"], [-2.0, 0.0]), (["pass", ""], [0.0, -2.0]), (["pass", "bet", "p"], [-2.0, 0.0])):
        replies = iter(said)
        assert play(KUHN, KUHN.task(0, 0), lambda _, replies=replies: Reply(next(replies))).rewards == rewards
    # A word that ran out of tokens is one: recipes/rl-kuhn.toml allows one token.
    assert not KUHN.reset(KUHN.task(0, 0)).step(Reply("bet", is_truncated=True)).is_done
    won = [play_oracle(KUHN, KUHN.task(seed, 0)).rewards[0] for seed in range(6)]
    assert sorted(won) == [-1, -1, -1, 1, 1, 1]
    assert not play_randomly(KUHN, KUHN.task(0, 0), Random(0)).last.metrics["illegal"]


def random_policy(random):
    return {name: random.uniform(0.1, 0.9) for name in INFORMATION_SETS}


def test_an_average_earns_the_mean_of_what_its_policies_earn():
    random = Random(7)
    print("seed 7")
    played, other = [random_policy(random) for _ in range(3)], random_policy(random)
    assert value(average(played), other) == pytest.approx(sum(value(each, other) for each in played) / 3, abs=1e-12)
    assert value(other, average(played)) == pytest.approx(sum(value(other, each) for each in played) / 3, abs=1e-12)


def recorded(policy, name, reply):
    """A rollout that ends with `reply` at an information set. Its tokens are of no meaning."""
    probability = policy[name] if reply == "bet" else 1 - policy[name]
    rollout, chat, parent = Rollout(KUHN.task(0, 0), 0), [*conversation(name)], None
    rollout.messages = [*chat, {"role": "assistant", "content": reply}]
    for message in rollout.messages:
        said = message["role"] == "assistant"
        logprobs = [math.log(probability if message is rollout.messages[-1] else 1 - policy[name[0]])]
        parent = rollout.tree.add(Segment([1], parent, said, logprobs if said else [], [0] if said else []))
    return rollout


def test_a_policy_is_read_from_records(tmp_path):
    random = Random(8)
    print("seed 8")
    played, writer = [random_policy(random) for _ in range(2)], RecordWriter(tmp_path, 2**20, 1)
    for step, policy in enumerate(played, start=1):
        reached = [name for name in INFORMATION_SETS if step == 1 or name != "Kpb"]
        rollouts = [recorded(policy, name, random.choice(["bet", "pass"])) for name in reached]
        columns = [[[None] * len(each.tree.segments) for each in rollouts]]
        writer.write(step, 2, {}, [Group(0, KUHN.task(0, 0), rollouts)], columns)
    found = policies(tmp_path)
    assert found[0] == pytest.approx(played[0])
    assert found[1] == pytest.approx(played[1] | {"Kpb": played[0]["Kpb"]})
