"""The engine's turns over a runner without a model: what is asked for comes out, once, whatever happens on the way."""

import pytest

from glm5.engine.transport.wire import AbortRequests, StopAnswer
from tests.support.core_driver import CoreDriver
from tests.support.fake_runner import experts_of, hashes, logprob_of

AHEAD = pytest.mark.parametrize("launch_ahead", [True, False])


@AHEAD
@pytest.mark.parametrize("max_depth", [0, 3])
def test_answers_are_those_of_lone_runs(launch_ahead, max_depth):
    driver = CoreDriver(launch_ahead=launch_ahead, max_depth=max_depth, max_tokens_per_step=20)
    for number in range(12):
        driver.ask(3 + 5 * number, max_tokens=4 + number, seed=number, stop_ids=(3, 4), min_tokens=number % 3)
    driver.run()
    driver.check()
    driver.check_empty()


def test_a_turn_launches_before_it_reads():
    driver = CoreDriver(launch_ahead=True)
    driver.ask(5, max_tokens=5)
    driver.turn()
    assert not driver.received[0].updates
    driver.turn()
    assert len(driver.runner.plans) == 2
    assert len(driver.received[0].token_ids) == 1


def test_without_launch_ahead_a_turn_reads_what_it_launched():
    driver = CoreDriver(launch_ahead=False)
    driver.ask(5, max_tokens=5)
    driver.turn()
    assert len(driver.received[0].token_ids) == 1


def test_no_work_no_turns():
    driver = CoreDriver()
    assert not driver.core.has_work
    driver.ask(5)
    assert driver.core.has_work
    driver.run()
    assert driver.core.step() == []
    assert not driver.core.has_work


@AHEAD
def test_several_answers_share_a_prompt(launch_ahead):
    driver = CoreDriver(launch_ahead=launch_ahead, max_depth=2)
    driver.ask(11, n=4)
    driver.run()
    driver.check()
    assert [driver.received[i].num_cached for i in range(4)] == [0, 10, 10, 10]


def test_what_was_cached_is_told_once():
    driver = CoreDriver()
    prompt = driver.prompt(14)
    driver.ask(prompt)
    driver.run()
    driver.ask(prompt)
    driver.run()
    assert [driver.received[i].num_cached for i in (0, 1)] == [0, 12]
    assert all(update.num_cached is None for i in (0, 1) for update in driver.received[i].updates[1:])


@AHEAD
def test_under_preemption(launch_ahead):
    driver = CoreDriver(launch_ahead=launch_ahead, num_pages=14, max_model_len=52, max_depth=2)
    for number in range(8):
        driver.ask(6 + number, max_tokens=30, seed=number, logprobs=0, routed_experts=number % 2 == 0)
    driver.run()
    driver.check()
    driver.check_empty()
    assert driver.core.stats()["preemptions"] > 3
    for received in driver.received.values():
        assert len(received.logprobs) == len(received.token_ids) == 30


@AHEAD
@pytest.mark.parametrize("max_depth", [0, 3])
def test_logprobs_belong_to_their_tokens(launch_ahead, max_depth):
    driver = CoreDriver(launch_ahead=launch_ahead, max_depth=max_depth)
    driver.ask(9, max_tokens=21, logprobs=2)
    driver.ask(9, max_tokens=21)
    driver.run()
    received = driver.received[0]
    tokens = received.ask.prompt_ids + received.token_ids
    values = hashes(tokens)[8:-1]
    assert [e.logprob for e in received.logprobs] == [
        logprob_of(value, token_id) for value, token_id in zip(values, received.token_ids, strict=True)
    ]
    assert not driver.received[1].logprobs


def told_prompts(driver, ids):
    return [(i, u.prompt_logprobs) for i in ids for u in driver.received[i].updates if u.prompt_logprobs is not None]


@AHEAD
@pytest.mark.parametrize("n", [1, 3])
def test_prompt_logprobs_come_once(launch_ahead, n):
    driver = CoreDriver(launch_ahead=launch_ahead, max_prompt_chunk=3, num_pages=16, max_model_len=60)
    driver.ask(driver.prompt(20))
    driver.run()
    # The prompt is cached, and must be computed all the same; others make its answers run out of pages.
    ids = driver.ask(driver.prompt(20), n=n, max_tokens=20, prompt_logprobs=1)
    for number in range(3):
        driver.ask(8, max_tokens=30, seed=number, priority=-1)
    driver.run()
    driver.check()
    ((_, entries),) = told_prompts(driver, ids)
    prompt = driver.prompt(20)
    assert [entry.token_id for entry in entries] == prompt[1:]
    values = hashes(prompt)
    assert [e.logprob for e in entries] == [logprob_of(values[i], prompt[i + 1]) for i in range(19)]
    assert driver.core.stats()["preemptions"]


@AHEAD
@pytest.mark.parametrize("gone_at", range(8))
def test_the_prompt_is_reported_though_who_computes_it_goes(launch_ahead, gone_at):
    driver = CoreDriver(launch_ahead=launch_ahead, max_prompt_chunk=4)
    ids = driver.ask(14, n=2, max_tokens=6, prompt_logprobs=0, routed_experts=True)
    driver.turn(gone_at)
    driver.core.receive(StopAnswer(ids[0]) if gone_at % 2 else AbortRequests((ids[0],)))
    driver.run()
    driver.check(ids[1])
    ((_, entries),) = told_prompts(driver, ids)
    assert len(entries) == 13
    found = driver.received[ids[0]].experts() | driver.received[ids[1]].experts()
    assert sorted(found) == list(range(19))
    driver.check_empty()


@AHEAD
@pytest.mark.parametrize("max_depth", [0, 3])
def test_experts_of_every_computed_token_come_once(launch_ahead, max_depth):
    driver = CoreDriver(
        launch_ahead=launch_ahead, max_depth=max_depth, num_pages=20, max_model_len=60, max_tokens_per_step=12
    )
    driver.ask(driver.prompt(18))
    driver.run()
    for number in range(5):
        driver.ask(driver.prompt(18), max_tokens=30, seed=number, routed_experts=True)
    driver.run()
    assert driver.core.stats()["preemptions"]
    for received in list(driver.received.values())[1:]:
        values = hashes(received.ask.prompt_ids + received.token_ids)
        assert received.experts() == {p: experts_of(values[p], 0) for p in range(len(values) - 1)}


def test_bad_requests_are_refused_and_harm_nobody():
    driver = CoreDriver()
    good = driver.ask(5)
    refused = {
        "the prompt is empty": driver.ask([]),
        "the prompt has 300 tokens": driver.ask(300),
        "prompt holds token ids 1 to 50": driver.ask([1, 2, 50]),
        "allowed: token ids below the vocabulary's 50": driver.ask(5, logit_bias={99: 1.0}),
        "stop_token_ids holds": driver.ask(5, stop_ids=(60,)),
        "bad_words holds": driver.ask(5, bad_words=((1, 77),)),
        "spellings of 1 to 32 tokens": driver.ask(5, bad_words=((),)),
        "max_tokens is 0": driver.ask(5, max_tokens=0),
        "129 stop tokens": driver.ask(5, stop_ids=(1,) * 129),
    }
    driver.run()
    driver.check(*good)
    for reason, (seq_id,) in refused.items():
        received = driver.received[seq_id]
        assert received.reason == "error"
        assert not received.token_ids
        assert reason in received.error
    driver.check_empty()


def test_grammars_need_a_tokenizer():
    from glm5.engine.sampling.params import StructuredOutputsParams

    driver = CoreDriver()
    driver.ask(5, structured_outputs=StructuredOutputsParams(regex="a+"))
    driver.run()
    assert "tokenizer" in driver.received[0].error


@AHEAD
@pytest.mark.parametrize("turns", range(9))
def test_abort_in_every_phase(launch_ahead, turns):
    """Queued, in the middle of the prompt, waiting for another's prompt, decoding, restoring, over."""
    driver = CoreDriver(launch_ahead=launch_ahead, max_num_seqs=3, max_prompt_chunk=4, tiers=True, max_depth=1)
    ids = [*driver.ask(10, max_tokens=4), *driver.ask(13, n=3, max_tokens=9), *driver.ask(9, max_tokens=9)]
    other = driver.ask(6, max_tokens=12)
    driver.turn(turns)
    driver.core.receive(AbortRequests(tuple(ids)))
    driver.run()
    driver.check(*other)
    for seq_id in ids:
        received = driver.received[seq_id]
        assert received.reason in ("abort", "length")
        assert received.token_ids == driver.expected(seq_id)[: len(received.token_ids)]
    driver.check_empty()


def test_abort_of_all_and_of_unknown_ids():
    driver = CoreDriver()
    for number in range(4):
        driver.ask(5, max_tokens=50, seed=number)
    driver.turn(3)
    driver.core.receive(AbortRequests((77,)))
    driver.core.receive(AbortRequests())
    late = driver.ask(5)
    driver.run()
    assert [driver.received[i].reason for i in range(4)] == ["abort"] * 4
    driver.check(*late)
    driver.check_empty()


@AHEAD
@pytest.mark.parametrize("turns", range(7))
def test_stop_ends_an_answer_without_a_word(launch_ahead, turns):
    driver = CoreDriver(launch_ahead=launch_ahead, max_depth=2)
    stopped, other = driver.ask(9, max_tokens=30), driver.ask(9, max_tokens=20, seed=5)
    driver.turn(turns)
    num_updates = len(driver.received[0].updates)
    driver.core.receive(StopAnswer(stopped[0]))
    driver.run()
    assert len(driver.received[0].updates) == num_updates
    driver.check(*other)
    driver.check_empty()


def test_a_step_that_raises_ends_the_engine():
    driver = CoreDriver()
    driver.ask(5, max_tokens=20)
    driver.turn(3)
    driver.runner.fails_at = len(driver.runner.plans) + 1
    with pytest.raises(FloatingPointError, match="on fire"):
        driver.run()


def test_figures():
    driver = CoreDriver(max_depth=2)
    prompt = driver.prompt(14)
    driver.ask(prompt, max_tokens=10)
    driver.run()
    driver.ask(prompt, max_tokens=10)
    driver.turn(2)
    figures = driver.core.stats()
    assert (figures["requests"], figures["decoding"], figures["waiting"]) == (2, 1, 0)
    driver.run()
    figures = driver.core.stats()
    assert figures["finished"] == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert figures["sampled_tokens"] == 20
    assert figures["prefix_cache"]["hit_tokens"]["device"] == 12
    assert figures["prefix_cache"]["missed_at_bits"] == {"0": 1, "4": 1}
    drafted, accepted = figures["speculation"]["drafted"], figures["speculation"]["accepted"]
    assert drafted[0] >= drafted[1] > 0
    assert accepted[0] >= accepted[1] > 0
