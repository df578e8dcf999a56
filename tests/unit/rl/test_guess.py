"""The hidden number: what can be earned with and without its answers, and that crashing never pays."""

from itertools import combinations, islice
from random import Random

import pytest

from glm5.rl.environments.guess import HIGHEST, IGNORING_ANSWERS, NUM_GUESSES
from glm5.rl.environments.play import play, play_oracle, play_randomly
from glm5.rl.environments.protocol import Reply
from glm5.rl.environments.table import make

GUESS, CRASHING = make("guess"), make("guess-crash")


def reward_of(environment, number, said):
    replies = iter(said)
    return play(environment, environment.task(number - 1, 0), lambda _: Reply(next(replies))).rewards[0]


@pytest.mark.parametrize("environment", [GUESS, CRASHING], ids=lambda each: each.name)
def test_binary_search_hits_all_numbers(environment):
    tasks = [environment.task(seed, 0) for seed in range(HIGHEST)]
    assert {task.data["number"] for task in tasks} == set(range(1, HIGHEST + 1))
    assert [play_oracle(environment, task).rewards for task in tasks] == [[1.0]] * HIGHEST


def test_whoever_ignores_the_answers_earns_at_most_4_of_15():
    rewards = [
        sum(reward_of(GUESS, number, map(str, said)) for number in range(1, HIGHEST + 1)) / HIGHEST
        for said in islice(combinations(range(1, HIGHEST + 1), NUM_GUESSES), 0, None, 37)
    ]
    assert max(rewards) == min(rewards) == IGNORING_ANSWERS


@pytest.mark.parametrize("said", ["", "0", "16", "08", "8.", "٣", "8 9", "-1", "eight", "crash"])
def test_an_illegal_guess_ends_the_game(said):
    assert reward_of(GUESS, 8, [said]) == 0.0


def test_answers_and_random_replies():
    random = Random(1)
    print("seed 1")
    played = play_randomly(GUESS, GUESS.task(6, 0), random)
    (chat,) = played.conversations
    said = [int(message["content"]) for message in chat if message["role"] == "assistant"]
    told = [message["content"] for message in chat if message["role"] == "user"]
    assert told[1:] == ["lower" if guess > 7 else "higher" for guess in said[:-1]]
    assert (said[-1] == 7) == (played.rewards == [1.0])


def test_a_crash_is_answered_and_costs_a_turn():
    assert reward_of(CRASHING, 8, ["crash", "8"]) == 1.0
    assert reward_of(CRASHING, 8, ["crash"] * NUM_GUESSES) == 0.0
    # A policy that crashes at all loses one of the guesses that the hardest numbers need.
    assert all(len(CRASHING.oracle(CRASHING.task(seed, 0))) == NUM_GUESSES for seed in (0, 2, 4))
