"""The four domains: no task twice, the oracle is right, wrong answers are not.

`pytest -m long -s tests/unit/rl/test_domains.py` prints the table for 10,000 tasks of each level.
"""

import hashlib
import json
import time
from collections import Counter
from fractions import Fraction

import pytest

from glm5.rl.environments.boxes import Boxes
from glm5.rl.environments.families import Family, Level, shuffled
from glm5.rl.environments.play import play, play_oracle
from glm5.rl.environments.protocol import EpisodeFailed, Reply
from glm5.rl.environments.table import make
from tests.unit.rl.boxes import FOLDERS, WITHIN

DOMAINS = ["math", "science", "code", "tools"]
NUM_LEVELS = 3
KEYS = "05807075e94249d3"  # of the first 12 tasks of every level


def reward_of(environment, task, *said):
    replies = iter([*said] * environment.num_turns)
    return play(environment, task, lambda _: Reply(next(replies))).rewards[0]


def wrong_answers(task):
    """Answers that are near the right one, or hide it among others."""
    if task.environment == "code":
        return ["", "f = lambda *_: None", "def f(*a): return str(a)", "def f(*a): return a[0]", "def f(", "f = 7"]
    answer, unit = Fraction(task.data["answer"]), task.data["unit"]
    numbers = {answer + 1, -answer - 2, 3 * answer + 5, answer + Fraction(1, 999_983)} - {answer}
    several = f"{answer} or {answer + 1}"
    return ["", "unknown", several, *map(str, numbers), f"{answer} wonders per {unit}", f"{answer} kWh/mol"]


def check(name, level, num_tasks, every_wrong=1):
    """Counts of (tasks, distinct keys, right oracles, refused, accepted wrong answers), and processor time."""
    environment, start = make(name, WITHIN), time.process_time()
    keys, right, wrong = set(), 0, Counter()
    for seed in range(num_tasks):
        task = environment.task(seed, level)
        keys.add(task.key)
        right += play_oracle(environment, task).rewards == [1.0]
        if seed % every_wrong == 0:
            wrong.update(reward_of(environment, task, said) for said in wrong_answers(task))
    return num_tasks, len(keys), right, wrong[0.0], wrong.total() - wrong[0.0], time.process_time() - start


@pytest.mark.parametrize("name", DOMAINS)
def test_tasks_are_distinct_and_answered_by_their_oracle_alone(name):
    assert make(name).levels == NUM_LEVELS
    for level in range(NUM_LEVELS):
        num_tasks, distinct, right, refused, accepted, _ = check(name, level, 80, every_wrong=20)
        assert distinct == right == num_tasks
        assert accepted == 0 < refused


@pytest.mark.long
def test_ten_thousand_tasks_of_each_level():
    print("\ndomain   level   tasks  distinct  oracle right  wrong refused  wrong accepted  processor s")
    for name in DOMAINS:
        for level in range(NUM_LEVELS):
            num_tasks, distinct, right, refused, accepted, seconds = check(name, level, 10_000, every_wrong=10)
            print(
                f"{name:8} {level:5} {num_tasks:7} {distinct:9} {right:13} {refused:14} {accepted:15} {seconds:12.1f}"
            )
            assert distinct == right == num_tasks
            assert accepted == 0 < refused


@pytest.mark.parametrize("name", DOMAINS)
def test_a_task_is_the_same_everywhere_and_hides_its_answer(name):
    environment = make(name)
    for level in range(NUM_LEVELS):
        task = environment.task(7, level)
        again = json.loads(json.dumps([task.messages, task.data, task.tools]))
        assert again == [list(task.messages), task.data, list(task.tools)]
        assert task.key == make(name).task(7, level).key
        assert "answer" not in json.dumps(task.messages)


def test_keys_do_not_change():
    """A run that goes on after an update must know its tasks: keys are part of the format of its record."""
    keys = [make(name).task(seed, level).key for name in DOMAINS for seed in range(12) for level in range(NUM_LEVELS)]
    assert hashlib.sha256("".join(keys).encode()).hexdigest()[:16] == KEYS


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 1000])
def test_a_permutation_takes_every_number_once(size):
    assert sorted(shuffled(number, size) for number in range(size)) == list(range(size))
    assert shuffled(size, size) == shuffled(0, size)


def test_a_level_takes_its_families_in_turn_and_all_points_before_one_twice():
    pairs = Family(lambda a, b: (a, b), {"a": range(3), "b": "xy"})
    level = Level([pairs, Family(lambda c: c, {"c": range(9)})])
    made = [level.made(seed) for seed in range(18)]
    assert len(set(made[::2][:6])) == 6
    assert sorted(made[1::2]) == list(range(9))
    assert level.made(12) == made[0]


def test_programs_run_apart_and_what_they_do_wrong_earns_nothing():
    code = make("code", FOLDERS)
    task = code.task(0, 0)  # f(n) = 31 n + 23
    source = task.data["source"]
    assert play_oracle(code, task).rewards == [1.0]
    assert reward_of(code, task, f"Thus:\n```py\nx = 1\n```\nno,\n```python\nprint('noise')\n{source}```\nDone.") == 1.0
    assert reward_of(code, task, f"{source}\nimport os\nos.write(1, b'[[0]]')") == 1.0
    ends = ("raise SystemExit", "import os; os._exit(0)", "print('[[1]]'); 1 / 0", "\x00", "# \ud800 x" * 10_000)
    for wrong in (*ends, source.replace("return", "return 1.0 *"), source.replace("return", "return 1 +")):
        assert reward_of(code, task, f"{source}\n{wrong}" if wrong in ends else wrong) == 0.0
    partly = play(code, task, lambda _: Reply("def f(n):\n    return 31 * n + 23 if n < 50 else 0"))
    assert partly.rewards == [0.0]
    assert 0 < partly.last.metrics["passed"] < 1


def test_a_program_that_ended_is_not_run_again_on_the_same_inputs():
    opened: list[None] = []
    code = make("code", Boxes(lambda: opened.append(None) or FOLDERS.open(), FOLDERS.python))
    first, second = code.task(0, 0), code.task(8, 0)  # two affine functions
    for task, right in ((first, 1.0), (first, 1.0), (second, 0.0), (first, 1.0)):
        assert reward_of(code, task, first.data["source"]) == right
    assert len(opened) == 2


def test_programs_that_need_a_sandbox_fail_without_one():
    assert list(make("code").sandbox_levels) == [0, 1, 2]
    assert list(make("tools").sandbox_levels) == [2]
    for name in ("code", "tools"):
        environment = make(name)
        with pytest.raises(EpisodeFailed) as caught:
            play_oracle(environment, environment.task(0, 2))
        assert caught.value.kind == "sandbox"
    assert play_oracle(make("tools"), make("tools").task(0, 1)).rewards == [1.0]
