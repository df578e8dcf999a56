"""Random lives of an engine core: requests, aborts, stops and calls at random turns, over a runner that foretells.

Whatever happens, every answer is what the weights of its tokens' versions draw, as far as it goes; what is reported
once is reported once; every call is answered; nothing is left.
"""

import json
from random import Random

import pytest

from glm5.engine.core.depth import Machine, StepCost
from glm5.engine.core.replies import PromptReport, Reply
from glm5.engine.core.tiering import Tiering
from glm5.engine.sampling.params import StructuredOutputsParams
from glm5.engine.scheduler.config import RestoreCost
from glm5.engine.scheduler.messages import Pause
from glm5.engine.transport.wire import (
    AbortRequests,
    PauseCall,
    ResetCacheCall,
    ResumeCall,
    SleepCall,
    StatsCall,
    StopAnswer,
    UpdateWeightsCall,
    WakeCall,
)
from tests.support.core_driver import CoreDriver, ReceivedAnswer
from tests.support.fake_runner import drawn, experts_of, extended, hashes, logprob_of
from tests.unit.engine.sampling.schemas import compiler, vocabulary

CHOICES = ["ab", "abc", "zz top", "q"]


class Life:
    """One random life. `numbers`: of the weights, by version."""

    def __init__(self, rng: Random, folder):
        self.rng = rng
        self.has_grammars = rng.random() < 0.3
        max_num_seqs = rng.randint(1, 6)
        self.driver = CoreDriver(
            tiers=rng.choice([None, None, True, folder]),
            compiler=compiler() if self.has_grammars else None,
            adaptive=rng.choice([None, StepCost(Machine(1e-3, 1e-3, 1e12, 1e12), 4, 1e6, 0, 1.0, 2e7, 1e6)]),
            draft_quality=rng.choice([0, 5, 8]),
            num_pages=rng.randint(12, 40),
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=max_num_seqs + rng.choice([2, 12, 40]),
            max_model_len=rng.randint(24, 46),
            max_depth=rng.choice([0, 1, 3]),
            launch_ahead=rng.random() < 0.7,
            prefix_cache=True,
            max_prompt_chunk=rng.choice([None, 3, 7]),
            headroom=rng.choice([0.0, 0.1]),
            restore_cost=RestoreCost(0, 0, 0),
            max_loads=rng.choice([1, 8]),
            max_stores=rng.choice([1, 8]),
        )
        self.numbers = {0: 0}
        self.documents = [self.driver.prompt(40, number) for number in range(2)]
        self.stopped: set[int] = set()
        self.calls: dict[int, object] = {}

    def run(self, num_requests: int) -> None:
        rng, driver = self.rng, self.driver
        num_submitted = 0
        while num_submitted < num_requests or rng.random() < 0.95:
            if num_submitted < num_requests and rng.random() < 0.4:
                num_submitted += 1
                self._ask()
            if rng.random() < 0.06 and driver.received:
                driver.core.receive(
                    AbortRequests(None if rng.random() < 0.1 else (rng.randrange(len(driver.received)), 10**6))
                )
            if rng.random() < 0.06 and driver.received:
                seq_id = rng.randrange(len(driver.received))
                self.stopped.add(seq_id)
                driver.core.receive(StopAnswer(seq_id))
            if rng.random() < 0.12:
                self._call()
            driver.turn()
        self._send(WakeCall)
        self._send(ResumeCall)
        driver.num_turns = 0
        while driver.core.has_work:
            driver.turn()
            driver.num_turns -= driver.core._wait == "copies" or bool(driver.core.intake.num_waiting)
        self._check()
        driver.core.close()

    def _ask(self) -> None:
        rng, driver = self.rng, self.driver
        document = rng.choice(self.documents)
        size = rng.randint(1, driver.config.max_model_len - 1)
        shared = rng.choice([0, size, rng.randint(0, size)])
        prompt = document[:shared] + [rng.randrange(driver.vocab_size) for _ in range(size - shared)]
        options = {
            "n": rng.choice([1, 1, 1, 3]),
            "seed": rng.randrange(1000),
            "priority": rng.choice([0, 0, 1]),
            "salt": rng.choice([b"", b"", b"b"]),
            "stop_ids": tuple(rng.sample(range(driver.vocab_size), rng.choice([0, 1, 9]))),
            "min_tokens": rng.choice([0, 0, 2]),
            "logprobs": rng.choice([None, 0]),
            "prompt_logprobs": rng.choice([None, None, 0]),
            "routed_experts": rng.random() < 0.3,
            "max_depth": rng.choice([None, None, 1]),
        }
        if self.has_grammars and rng.random() < 0.3:
            options |= {"structured_outputs": StructuredOutputsParams(choice=CHOICES), "min_tokens": 0}
            options |= {"stop_ids": tuple(vocabulary().eos_ids)}
        driver.ask(prompt, rng.randint(max(1, options["min_tokens"]), 30), **options)

    def _call(self) -> None:
        match self.rng.randrange(10):
            case 0:
                self._send(PauseCall)
            case 1 | 2:
                self._send(ResumeCall)
            case 3:
                self._send(SleepCall, level=self.rng.choice([1, 2]))
            case 4:
                self._send(WakeCall)
            case 5 | 8 | 9:
                policy = self.rng.choice(["keep", "recompute", "recompute", "abort"])
                self._send(UpdateWeightsCall, path=self.rng.choice(["/1", "/2", "/3", "/bad"]), policy=policy)
            case 6:
                self._send(ResetCacheCall)
            case _:
                self._send(StatsCall)

    def _send(self, kind, **fields) -> None:
        message = kind(len(self.calls), **fields)
        self.calls[message.call_id] = message
        self.driver.core.receive(message)

    def _check(self) -> None:
        driver = self.driver
        driver.check_empty()
        for call_id, call in self.calls.items():
            answer = driver.answers[call_id]
            if answer.error is None and isinstance(call, UpdateWeightsCall):
                number = int(call.path[1:])
                assert self.numbers.setdefault(answer.result["version"], number) == number
        for seq_id, received in driver.received.items():
            self._check_answer(seq_id, received)
        self._check_prompts()

    def _check_answer(self, seq_id: int, received: ReceivedAnswer) -> None:
        ask, driver = received.ask, self.driver
        if seq_id not in self.stopped:
            assert received.reason in ("stop", "length", "abort"), received.error
        value = hashes(ask.prompt_ids)[-1]
        is_free = ask.params.structured_outputs is None
        for number, (token_id, version) in enumerate(zip(received.token_ids, received.versions, strict=True)):
            if is_free:
                assert token_id == drawn(value, received.seed, self.numbers[version], driver.vocab_size)
            if ask.params.logprobs is not None:
                assert received.logprobs[number].logprob == logprob_of(value, token_id)
            value = extended(value, token_id)
            ends = token_id in ask.stop_ids and number + 1 >= ask.params.min_tokens
            assert not ends or (number + 1 == len(received.token_ids) and received.reason == "stop")
        assert len(received.logprobs) == (len(received.token_ids) if ask.params.logprobs is not None else 0)
        if received.reason == "length":
            room = driver.config.max_model_len - len(ask.prompt_ids)
            assert len(received.token_ids) == min(ask.max_tokens, room)
        if received.reason == "stop" and not is_free:
            spelled = b"".join(vocabulary().bytes_of(token_id) for token_id in received.token_ids[:-1])
            assert spelled.decode() in CHOICES, json.dumps(spelled.decode())

    def _check_prompts(self) -> None:
        """What is said of prompts and experts, once for every request that had an answer to its end."""
        asks = {id(received.ask): received.ask for received in self.driver.received.values()}
        for key, ask in asks.items():
            answers = [received for received in self.driver.received.values() if id(received.ask) == key]
            reported = [u.prompt_logprobs for one in answers for u in one.updates if u.prompt_logprobs is not None]
            assert len(reported) <= 1
            if ask.params.prompt_logprobs is not None and any(one.token_ids for one in answers):
                values = hashes(ask.prompt_ids)
                want = [logprob_of(values[i], ask.prompt_ids[i + 1]) for i in range(len(values) - 1)]
                assert [[entry.logprob for entry in one] for one in reported] == [want]
            if not ask.routed_experts:
                continue
            last = len(ask.prompt_ids) - 1
            prompts = [one for one in answers if last and 0 in one.experts()]
            assert len(prompts) <= 1
            assert not last or len(prompts) == any(one.token_ids for one in answers)
            for one in answers:
                first = 0 if one in prompts else last
                stop = last + len(one.token_ids) if one.token_ids else first
                assert sorted(one.experts()) == list(range(first, stop))
                values = hashes(ask.prompt_ids + one.token_ids)
                possible = self.numbers.values()
                for position, row in one.experts().items():
                    assert row in [experts_of(values[position], number) for number in possible]


@pytest.mark.parametrize("number", range(25))
def test_random_lives(number, rng, tmp_path):
    life = Life(rng, tmp_path)
    life.run(num_requests=14)


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(80), *(pytest.param(n, marks=pytest.mark.long) for n in range(80, 400))])
def test_many_random_lives(number, rng, tmp_path):
    life = Life(rng, tmp_path)
    life.run(num_requests=30)


def masks_are_forgotten(monkeypatch):
    monkeypatch.setattr("glm5.engine.core.engine_core.fill_masks", lambda *args: None)


def grammars_do_not_advance(monkeypatch):
    monkeypatch.setattr("glm5.engine.sampling.grammar.Matcher.advance", lambda self, token_ids: True)


def weights_keep_their_identity(monkeypatch):
    def swap(self, staged, version):
        self.number, self.version = staged, version

    monkeypatch.setattr("tests.support.fake_runner.FakeWeights.swap", swap)


def prompts_are_told_by_every_answer(monkeypatch):
    taken = PromptReport.take

    def take(self):
        logprobs, routed = list(self._logprobs or ()), None
        taken(self)
        self.is_taken, self._logprobs = False, logprobs or None
        return logprobs or None, routed

    monkeypatch.setattr(PromptReport, "take", take)


def experts_are_told_again(monkeypatch):
    def own(self, routed):
        return None if routed is None or routed.start + routed.shape[0] < self.spec.num_prompt else routed

    monkeypatch.setattr(Reply, "_own_experts", own)


def logprobs_are_not_trimmed(monkeypatch):
    update = Reply.update

    def untrimmed(self, token_ids, version, reason, result):
        made = update(self, token_ids, version, reason, result)
        if made.logprobs is not None:
            made.logprobs = result.logprobs[self.seq_id]
        return made

    monkeypatch.setattr(Reply, "update", untrimmed)


def a_sleep_keeps_pages(monkeypatch):
    monkeypatch.setattr("glm5.engine.core.control.Pause", lambda release=False: Pause(release=False))


def memory_is_given_back_too_early(monkeypatch):
    monkeypatch.setattr("glm5.engine.core.control.Control._until_still", lambda self: iter(()))


def refused_copies_are_not_answered(monkeypatch):
    monkeypatch.setattr(Tiering, "_begin", lambda self, copy_id, handle: False)


MUTANTS = [
    masks_are_forgotten,
    grammars_do_not_advance,
    weights_keep_their_identity,
    prompts_are_told_by_every_answer,
    experts_are_told_again,
    logprobs_are_not_trimmed,
    a_sleep_keeps_pages,
    memory_is_given_back_too_early,
    refused_copies_are_not_answered,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_is_noticed(mutate, rng, tmp_path, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        for number in range(60):
            Life(rng, tmp_path / str(number)).run(num_requests=14)
