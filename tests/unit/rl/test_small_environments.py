"""Digits, grid, tiny terminal and memory: optima, floors, what earns nothing. Random replies are legal."""

from itertools import product
from random import Random

import pytest

from glm5.rl.environments.grid import LEVELS, MAX_STEPS, MOVES, NUM_TURNS, shortest_way
from glm5.rl.environments.memory import CHANCE, GO_ON, STEPS, VALUES
from glm5.rl.environments.play import play, play_oracle, play_randomly
from glm5.rl.environments.protocol import Reply
from glm5.rl.environments.table import make

SMALL = ["guess", "guess-crash", "reverse", "sort", "grid", "tiny-terminal", "memory"]


def reward_of(environment, task, *said):
    replies = iter(said)
    return play(environment, task, lambda _: Reply(next(replies))).rewards[0]


@pytest.mark.parametrize("name", SMALL)
def test_the_oracle_earns_1_and_random_replies_are_legal(name):
    environment, random = make(name), Random(name)
    print(f"seed {name}")
    for level, seed in product(range(environment.levels), range(20)):
        task = environment.task(seed, level)
        assert environment.task(seed, level).key == task.key
        assert play_oracle(environment, task).rewards == [1.0]
        played = play_randomly(environment, task, random)
        assert 0.0 <= played.rewards[0] <= 1.0
        assert not played.last.metrics.get("illegal")


@pytest.mark.parametrize("name", ["reverse", "sort"])
def test_rows_of_digits(name):
    environment = make(name)
    assert len({environment.task(seed, 0).key for seed in range(10_000)}) == 10_000
    task = environment.task(3, 1)
    digits, wanted = task.data["digits"], task.data["wanted"]
    assert wanted == ("".join(reversed(digits)) if name == "reverse" else "".join(sorted(digits)))
    assert reward_of(environment, task, f" {wanted}\n") == 1.0
    assert reward_of(environment, task, "") == 0.0
    assert reward_of(environment, task, wanted[:4]) == 0.5
    assert reward_of(environment, task, wanted * 2) == 0.5  # digits too many do not pay
    assert reward_of(environment, task, "x" + wanted[1:]) == 7 / 8


def ways(moves):
    """Every row of steps up to that length, the shortest first."""
    return ("".join(way) for length in range(1, moves + 1) for way in product(MOVES, repeat=length))


def test_the_way_of_a_grid_is_the_shortest():
    grid = make("grid")
    for seed in range(4):
        task = grid.task(seed, 0)
        rewards = ((way, reward_of(grid, task, way, "x")) for way in ways(len(task.data["way"])))
        first = next(way for way, reward in rewards if reward > 0)
        assert len(first) == len(task.data["way"]) <= MAX_STEPS


def test_the_door_opens_with_the_key_alone():
    # me . door      the key lies behind the door: no way, though the door can be reached
    # wall wall .
    assert shortest_way(3, (0, 0), (2, 1), (2, 0), {(0, 1), (1, 1)}) == ""
    assert shortest_way(3, (0, 0), (1, 0), (2, 0), set()) == "EE"
    assert shortest_way(3, (0, 0), (0, 1), (1, 0), set()) in ("SNE", "SEN")


def test_steps_and_replies_in_a_grid_are_bounded():
    grid = make("grid")
    task = next(task for seed in range(99) if len((task := grid.task(seed, 2)).data["way"]) >= 6)
    way = task.data["way"]
    assert reward_of(grid, task, *way) == 1.0  # step by step
    back = {"N": "S", "S": "N", "E": "W", "W": "E"}[way[0]]
    assert reward_of(grid, task, way[0] + back + way) == pytest.approx(len(way) / (len(way) + 2))
    for said in ("", "up", "n", way + "!"):
        assert reward_of(grid, task, said) == 0.0
    assert reward_of(grid, task, "N" * (MAX_STEPS + 1)) == 0.0
    assert reward_of(grid, task, *"NS" * (NUM_TURNS // 2)) == 0.0
    assert [side for side, _ in LEVELS] == [grid.task(0, level).data["side"] for level in range(grid.levels)]


def test_a_tiny_shell_shows_and_changes_files():
    tiny = make("tiny-terminal")
    task = tiny.task(1, 0)
    name, size, folder = next(file for file in task.data["files"] if task.messages[0]["content"].split()[1] == file[1])
    wrong = next(file[0] for file in task.data["files"] if file[0] != name)
    episode = tiny.reset(task)
    listed = episode.step(Reply("ls")).messages[0]["content"]
    assert f"{name} {size}" in listed
    assert folder == 1
    assert reward_of(tiny, task, *task.data["way"]) == 1.0
    assert reward_of(tiny, task, task.data["way"][-1]) == 1.0  # whoever guesses right need not look
    assert reward_of(tiny, task, f"rm {wrong}", "ls", "ls", task.data["way"][-1]) == 0.0
    assert reward_of(tiny, task, "ls", "ls", "ls", "ls") == 0.0
    for said in ("rm z", "cd 9", f"mv {name} 1", "", "rm", "look", f"{task.data['way'][-1]} 1"):
        assert reward_of(tiny, task, said) == 0.0
    assert len({tiny.task(seed, 0).key for seed in range(10_800)}) == 10_800
    keys = {tiny.task(2**40 + seed, 0).key for seed in range(128)}  # those that recipes/rl-terminal.toml holds out
    assert not keys & {tiny.task(seed, 0).key for seed in range(2048)}


@pytest.mark.parametrize("level", range(len(STEPS)))
def test_a_value_is_told_once_and_asked_for_at_the_end(level):
    memory, on_the_way = make("memory"), [GO_ON] * STEPS[level]
    tasks = [memory.task(seed, level) for seed in range(10)]
    for value in VALUES:  # whoever has forgotten it
        assert sum(reward_of(memory, task, *on_the_way, value) for task in tasks) == CHANCE * len(tasks)
    (chat,) = play_oracle(memory, tasks[1]).conversations
    assert [one["content"] for one in chat if one["role"] == "user"] == ["Remember"]
    told = [one["content"] for one in chat if one["role"] == "tool"]
    assert len(told) == STEPS[level]
    assert [said in VALUES for said in told] == [True] + [False] * (STEPS[level] - 1)


@pytest.mark.parametrize("said", ["", "b", "OK", "ok ok"])
def test_replies_on_the_way_carry_nothing(said):
    memory = make("memory")
    task = memory.task(1, 0)
    assert reward_of(memory, task, GO_ON, said) == 0.0
    assert reward_of(memory, task, *[GO_ON] * STEPS[0], said) == float(said == task.data["value"])
