"""Requests with a grammar: compiled beside the steps, masked in every step, others unharmed."""

import json
import re
from concurrent.futures import Future
from itertools import pairwise

import pytest

from glm5.common.errors import RequestError
from glm5.engine.sampling import grammar
from glm5.engine.sampling.compiling import Compilation
from glm5.engine.sampling.params import StructuredOutputsParams
from glm5.engine.transport.wire import AbortRequests, StopAnswer
from tests.support.core_driver import CoreDriver
from tests.support.fake_runner import lone_run
from tests.unit.engine.sampling.schemas import compiler, vocabulary

AHEAD = pytest.mark.parametrize("launch_ahead", [True, False])
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WANTED = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)


def text_of(driver, seq_id, first=0):
    ids = driver.received[seq_id].token_ids[first:]
    return b"".join(vocabulary().bytes_of(token_id) for token_id in ids).decode()


def ask_json(driver, **options):
    options = {"max_tokens": 80, "stop_ids": tuple(vocabulary().eos_ids), "structured_outputs": WANTED} | options
    return driver.ask(5, **options)


def run(driver):
    """Compiling takes real time; the driver's turns are bounded."""
    while driver.core.has_work:
        driver.num_turns = 0
        driver.turn()


@AHEAD
@pytest.mark.parametrize("max_depth", [0, 3])
def test_answers_are_in_their_grammar(launch_ahead, max_depth):
    driver = CoreDriver(compiler=compiler(), launch_ahead=launch_ahead, max_depth=max_depth, num_pages=60)
    ids = [seq_id for seed in range(4) for seq_id in ask_json(driver, seed=seed, n=1 + seed % 2)]
    plain = [driver.ask(9, max_tokens=30, seed=seed)[0] for seed in range(3)]
    run(driver)
    for seq_id in ids:
        assert driver.received[seq_id].reason == "stop"
        answer = json.loads(text_of(driver, seq_id))
        assert answer["name"] in ("ada", "grace")
        assert 0 <= answer["age"] <= 99
    assert len({tuple(driver.received[seq_id].token_ids) for seq_id in ids}) > 1
    driver.check(*plain)
    driver.check_empty()


def test_tokens_do_not_depend_on_depth_or_launching_ahead():
    def answers(**options):
        driver = CoreDriver(compiler=compiler(), **options)
        ids = [ask_json(driver, seed=seed)[0] for seed in range(5)]
        run(driver)
        return [driver.received[seq_id].token_ids for seq_id in ids]

    first = answers(launch_ahead=False)
    assert answers(max_depth=3) == answers(max_depth=1, max_num_seqs=2) == first


def test_a_constrained_answer_sits_out_while_others_run_ahead():
    driver = CoreDriver(compiler=compiler(), launch_ahead=True)
    ask_json(driver)
    while not driver.core.scheduler.live:
        driver.turn()
    driver.ask(5, max_tokens=60)
    run(driver)
    rows = [[item.seq_id for item in plan.items] for plan in driver.runner.plans if plan.items]
    together = [seq_ids for seq_ids in rows if 0 in seq_ids]
    assert len(together) < len(rows)
    assert not any(0 in a and 0 in b for a, b in pairwise(rows)), "its mask was not known yet"
    driver.check(1)


def test_after_preemption_the_grammar_goes_on():
    driver = CoreDriver(compiler=compiler(), num_pages=14, max_model_len=52, max_depth=1)
    pattern = StructuredOutputsParams(regex="[ab]{40}")
    ids = [ask_json(driver, seed=seed, structured_outputs=pattern, max_tokens=40)[0] for seed in range(4)]
    run(driver)
    assert driver.core.stats()["preemptions"]
    for seq_id in ids:
        assert re.fullmatch("[ab]{1,40}", text_of(driver, seq_id))
    driver.check_empty()


def test_a_grammar_that_begins_after_a_token():
    driver = CoreDriver(compiler=compiler())
    free = lone_run(driver.prompt(5), 1, 6, vocabulary().size)
    (seq_id,) = ask_json(driver, max_tokens=150, starts_after=free[-1])
    run(driver)
    assert driver.received[seq_id].token_ids[:6] == free
    assert free[-1] not in free[:-1]
    assert json.loads(text_of(driver, seq_id, 6))


@AHEAD
@pytest.mark.parametrize("max_depth", [0, 3])
def test_a_budget_of_thinking(launch_ahead, max_depth):
    """The end of thinking comes where the budget ends, and at no cost in what comes before."""
    driver = CoreDriver(compiler=compiler(), launch_ahead=launch_ahead, max_depth=max_depth, num_pages=60)
    free = lone_run(driver.prompt(5), 1, 40, vocabulary().size)
    end = next(token_id for token_id in range(vocabulary().size) if token_id not in free)
    (alone,) = driver.ask(5, max_tokens=20, starts_after=end, thinking_token_budget=7)
    (both,) = ask_json(driver, max_tokens=150, starts_after=end, thinking_token_budget=4, not_before=(free[1],))
    (none,) = driver.ask(5, max_tokens=20, thinking_token_budget=7)
    run(driver)
    assert driver.received[alone].token_ids[:8] == [*free[:7], end]
    assert len(driver.received[alone].token_ids) == 20
    written = driver.received[both].token_ids
    assert (written[4], written.count(end), free[1] in written[:4]) == (end, 1, False)
    assert json.loads(text_of(driver, both, 5))
    driver.check(none)


class Slow:
    """A compiler that is ready when a test says so."""

    def __init__(self):
        self._vocabulary, self.future = vocabulary(), Future()

    def compile(self, wanted, salt):
        return Compilation(self.future, 3600)

    def close(self):
        pass


def test_others_pass_a_request_whose_grammar_is_compiling():
    driver = CoreDriver(compiler=Slow())
    ask_json(driver)
    (other,) = driver.ask(5, max_tokens=9)
    while driver.received[other].reason is None:
        driver.turn()
    driver.check(other)
    assert driver.core.has_work
    assert driver.core.stats()["waiting"] == 1
    driver.turn(3)
    driver.core.compiler.future.set_result(compiler().compile(WANTED).result())
    driver.run()
    assert json.loads(text_of(driver, 0))


@pytest.mark.parametrize("message", [AbortRequests((0, 1)), AbortRequests(), StopAnswer(0)])
def test_abort_while_its_grammar_is_compiling(message):
    driver = CoreDriver(compiler=Slow())
    ask_json(driver, n=2)
    driver.turn(2)
    driver.core.receive(message)
    driver.turn()
    if isinstance(message, StopAnswer):
        assert not driver.received[0].updates
        driver.core.receive(AbortRequests((1,)))
        driver.turn()
    else:
        assert driver.received[0].reason == "abort"
    assert driver.received[1].reason == "abort"
    driver.run()
    driver.check_empty()


def test_one_answer_of_two_goes_while_the_grammar_is_compiling():
    driver = CoreDriver(compiler=Slow())
    ask_json(driver, n=2)
    driver.turn()
    driver.core.receive(AbortRequests((0,)))
    driver.core.compiler.future.set_result(compiler().compile(WANTED).result())
    driver.run()
    assert driver.received[0].reason == "abort"
    assert json.loads(text_of(driver, 1))
    driver.check_empty()


def test_a_grammar_that_is_refused():
    driver = CoreDriver(compiler=compiler())
    (bad,) = ask_json(driver, structured_outputs=StructuredOutputsParams(regex="(a"))
    halves = {"properties": {"\ud800": {"uniqueItems": True}}}
    (half,) = ask_json(driver, structured_outputs=StructuredOutputsParams(json=halves))
    (good,) = driver.ask(5)
    run(driver)
    assert "is not understood" in driver.received[bad].error
    assert "#/properties/\\ud800/uniqueItems" in driver.received[half].error  # which can be sent
    driver.check(good)
    driver.check_empty()


def test_a_compilation_that_fails_otherwise_fails_its_request_alone():
    driver = CoreDriver(compiler=Slow())
    ask_json(driver)
    driver.core.compiler.future.set_exception(RequestError("no"))
    driver.run()
    assert driver.received[0].error == "no"


class NoToken:
    """A grammar without a way on."""

    is_slow = False

    def advance(self, token_ids):
        return True

    def fill(self, drafts, bitmask):
        bitmask.zero_()


@AHEAD
def test_where_no_token_is_possible_the_request_fails_with_the_reason(launch_ahead):
    driver = CoreDriver(compiler=compiler(), launch_ahead=launch_ahead, max_depth=2)
    (stuck,) = ask_json(driver, bad_words=((1, 2),))
    (other,) = driver.ask(5, max_tokens=30)
    while stuck not in driver.core._constrained:
        driver.turn()
    driver.turn(4)
    driver.core._constrained[stuck].matcher = NoToken()
    driver.run()
    assert driver.received[stuck].reason == "error"
    assert "structured_outputs" in driver.received[stuck].error
    driver.check(other)
    driver.check_empty()


def test_a_grammar_that_is_slow_fails_and_others_go_on(monkeypatch):
    monkeypatch.setattr(grammar, "MAX_SECONDS", -1.0)
    driver = CoreDriver(compiler=compiler())
    (slow,) = ask_json(driver)
    (good,) = driver.ask(5, max_tokens=30)
    run(driver)
    assert driver.received[slow].reason == "error"
    assert "structured_outputs takes too long for each token" in driver.received[slow].error
    driver.check(good)
    driver.check_empty()


def test_an_answer_that_leaves_its_grammar_fails():
    class Leaves(NoToken):
        def advance(self, token_ids):
            return False

        def fill(self, drafts, bitmask):
            bitmask.fill_(-1)

    driver = CoreDriver(compiler=compiler())
    (seq_id,) = ask_json(driver)
    while seq_id not in driver.core._constrained:
        driver.turn()
    driver.core._constrained[seq_id].matcher = Leaves()
    driver.run()
    assert "left its grammar" in driver.received[seq_id].error
    driver.check_empty()
