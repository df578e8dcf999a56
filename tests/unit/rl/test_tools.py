"""Tools: what calls give, what is told of wrong ones, and the calculator's bounds."""

import pytest

from glm5.rl.environments.calculator import calculate
from glm5.rl.environments.protocol import Reply
from glm5.rl.environments.table import make
from glm5.rl.environments.tool_use import MAX_CALLS, call
from glm5.rl.environments.tools import NUM_TURNS
from tests.unit.rl.boxes import FOLDERS, WITHIN

TOOLS = make("tools", WITHIN)


def asked(episode, *calls):
    return [message["content"] for message in episode.step(Reply("", tool_calls=calls)).messages]


def test_calls_are_answered_in_order_and_counted():
    task = TOOLS.task(0, 1)  # what several of two items cost together
    first, second = list(task.data["table"])
    episode = TOOLS.reset(task)
    prices = asked(episode, *(call("lookup", item=item, field="price") for item in (first, second)))
    assert prices == [task.data["table"][item]["price"] for item in (first, second)]
    sum_of = {"name": "calculator", "arguments": '{"expression": "1 + 1"}'}  # arguments as JSON text
    turn = episode.step(Reply("", tool_calls=[{"id": "c7", "type": "function", "function": sum_of}]))
    assert turn.messages == ({"role": "tool", "tool_call_id": "c7", "content": "2"},)
    end = episode.step(Reply(task.data["answer"]))
    assert end.rewards == {"right": 1.0}
    assert end.metrics == {"tool_calls": 3.0, "tool_errors": 0.0}


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("look", {}, "there are lookup, calculator"),
        ("python", {"code": "1"}, "no tool is called 'python'"),  # not at this level
        ("lookup", {"item": "XXX", "field": "price"}, "no item 'XXX'"),
        ("lookup", {"item": "XXX"}, "'field' is missing"),
        ("lookup", {"item": ["XXX"], "field": "price"}, "must be text"),
        ("calculator", "{", "Expecting"),
        ("calculator", "[1]", "JSON object"),
        ("calculator", "[" * 19_000, "error: "),
        ("calculator", "[" * 21_000, "allowed are 20000"),
        ("calculator", {"expression": "1 / 0"}, "division by zero"),
        (None, None, "no tool"),
        ([], {}, "error: "),
    ],
)
def test_a_wrong_call_is_told_and_no_failure(name, arguments, told):
    episode = TOOLS.reset(TOOLS.task(0, 0))
    (said,) = asked(episode, {"id": "x", "function": {"name": name, "arguments": arguments}})
    assert said.startswith("error: ")
    assert told in said
    assert asked(episode, {}) == ["error: 'function' is missing"]


def test_calls_and_turns_are_bounded():
    episode = TOOLS.reset(TOOLS.task(0, 0))
    one = call("calculator", expression="1")
    assert len(asked(episode, *[one] * 100)) == MAX_CALLS
    turns = [episode.step(Reply("5", tool_calls=[one])) for _ in range(NUM_TURNS - 1)]
    assert [turn.is_done for turn in turns] == [False] * (NUM_TURNS - 2) + [True]
    assert turns[-1].rewards == {"right": 0.0}
    late = TOOLS.reset(TOOLS.task(0, 0))
    assert late.step(Reply(TOOLS.task(0, 0).data["answer"], is_truncated=True)).rewards == {"right": 0.0}


def test_programs_print_and_their_errors_are_told():
    tools = make("tools", FOLDERS)
    episode = tools.reset(tools.task(0, 2))
    printed, failed, ended = (
        asked(episode, call("python", code=code))[0]
        for code in ("print(6 * 7)", "print(1); 1 / 0", "import os; os._exit(3)")
    )
    assert printed == "42\n"
    assert failed.startswith("1\n")
    assert "ZeroDivisionError" in failed
    assert ended == ""
    episode.close()
    episode.close()


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        (" (2 + 3) * -4 ", "-20"),
        ("0.1 + 0.2", "0.3"),
        ("2 / 3", "0.6666666667"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 60", str(2**60)),
        ("4 ** -1", "0.25"),
        ("1e3", "1000"),
        ("1_000", "1000"),
    ],
)
def test_the_calculator(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    ["", "x", "1 if 2 else 3", "f(1)", "'a' * 9", "True", "1j", "9 ** 9 ** 9", "2 ** 0.5", "1 / (1 - 1)", "0 ** -1",
     "1 << 9", "1e999", "1e-999999999", "(" * 150, "-" * 190 + "1 +", "9" * 300, "__import__('os')", "\x00", "[1][0]"],
)  # fmt: skip
def test_what_the_calculator_refuses(expression):
    with pytest.raises(ValueError, match=r"."):
        calculate(expression)
