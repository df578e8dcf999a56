"""Steps beside requests that decode keep to a time, on machines and contexts of any speed. Seconds are made up here."""

from dataclasses import dataclass

import pytest

from glm5.config.engine import EngineConfig
from glm5.config.presets import preset
from glm5.engine.core.depth import StepCost
from glm5.engine.core.pace import PromptPace, PromptShare, furthest_prompt
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import Message, SetPromptShare, Submit
from glm5.engine.scheduler.plan import Item, StepPlan
from glm5.engine.scheduler.scheduler import Scheduler
from tests.support.core_driver import CoreDriver
from tests.support.scheduling.driver import TOKEN, submit

WANTED_S = 0.08
# The most that a step may be longer than wanted, of the step and of 16 first rows where nothing is known.
MARGIN = 1.25


@dataclass
class Machine:
    """Seconds of a step: models/mini in bfloat16 on a core of a Xeon with AVX-512, times `slower`."""

    slower: float = 1.0
    decode_s: float = 0.010

    def seconds(self, items: list[Item]) -> float:
        chunks = [item for item in items if item.kind == "prefill"]
        decode = self.decode_s * (len(items) - len(chunks)) + 0.012 * bool(chunks)
        rows = sum(item.num_rows * (0.7e-3 + 5.3e-3 * (item.start + item.num_rows) / 16384) for item in chunks)
        return self.slower * (decode + rows)


class Run:
    """A scheduler and its pace on such a machine; `pace` None as without. `steps`: plans and their seconds."""

    def __init__(self, machine: Machine, pace: PromptPace | None, **options):
        config = {"page_size": 64, "num_pages": 2000, "max_num_seqs": 64, "max_tokens_per_step": 2048}
        config |= {"max_model_len": 16384, "launch_ahead": False}
        self.machine, self.pace = machine, pace
        self.scheduler = Scheduler(SchedulerConfig(**config | options))
        self.steps: list[tuple[StepPlan, float]] = []
        self.ended: list[int] = []

    def step(self, *messages: Message) -> StepPlan:
        reported = list(messages)
        if self.pace is not None and self.scheduler.decoding:
            start = furthest_prompt(self.scheduler, reported)
            if start is not None:
                reported.append(SetPromptShare(self.pace.choose(len(self.scheduler.decoding), start)))
        number = self.scheduler.next_step
        self.scheduler.deliver(number, reported)
        plan = self.scheduler.plan(number)
        assert plan.items, f"nothing to do at {number}"
        seconds = self.machine.seconds(plan.items)
        if self.pace is not None:
            self.pace.observe(plan.items, seconds)
        self.steps.append((plan, seconds))
        outputs = self.scheduler.apply(number, {item.seq_id: [TOKEN] for item in plan.items if item.samples})
        self.ended += [output.seq_id for output in outputs.ended]
        return plan

    def until_sampled(self, request: Submit) -> list[float]:
        """Steps up to the first token of a new sequence; the seconds of those in which others decoded."""
        first, messages = len(self.steps), [request]
        while not any(item.seq_id in request.seq_ids and item.samples for item in self.step(*messages).items):
            messages = []
        return [seconds for plan, seconds in self.steps[first:] if plan.items[0].kind == "decode"]


def prompt_share(
    machine: Machine, pace: PromptPace | None, num_prompt: int = 16000, num_decoding: int = 1
) -> list[float]:
    """Seconds of the steps in which a prompt is computed while others decode."""
    run = Run(machine, pace)
    run.step(*(submit(number, 20, 16000) for number in range(num_decoding)))
    for _ in range(20):
        run.step()
    return run.until_sampled(submit(100, num_prompt, 1))


@pytest.mark.parametrize("slower", [0.05, 1.0, 1.5])
def test_a_long_prompt_does_not_hold_up_who_decodes(slower):
    machine = Machine(slower)
    found = prompt_share(machine, PromptPace(WANTED_S, 2048))
    assert max(found) < MARGIN * WANTED_S
    alone = sum(prompt_share(machine, None))
    assert sum(found) < 2 * alone, "the prompt gets on"
    if slower == 1.0:
        assert max(prompt_share(machine, None)) > 50 * WANTED_S, "without a pace they wait for seconds"


def test_a_prompt_from_a_cache_begins_where_rows_are_dear():
    run = Run(Machine(), PromptPace(WANTED_S, 2048))
    run.step(submit(0, 20, 16000))
    for _ in range(5):
        run.step(submit(len(run.steps), 300, 1))
    known = tuple(range(14000))
    run.until_sampled(submit(100, 0, 1, prompt_ids=known))
    for _ in range(5):
        run.step(submit(len(run.steps), 300, 1))
    seconds = run.until_sampled(submit(101, 0, 1, prompt_ids=(*known, *range(2000))))
    (entered,) = [one for plan, _ in run.steps for one in plan.entered if one.seq_id == 101]
    assert entered.hit_device > 13000
    assert max(seconds) < MARGIN * WANTED_S


def test_a_short_prompt_does_not_wait_for_a_long_one_beside_who_decodes():
    run = Run(Machine(), PromptPace(WANTED_S, 2048))
    run.step(submit(0, 20, 16000))
    run.step(submit(1, 16000, 1))
    for _ in range(50):
        run.step()
    assert len(run.until_sampled(submit(2, 100, 1))) < 20


def test_a_machine_that_becomes_slow_is_noticed():
    machine, pace = Machine(), PromptPace(WANTED_S, 2048)
    run = Run(machine, pace)
    run.step(submit(0, 20, 16000), submit(1, 16000, 1))
    for _ in range(200):
        run.step()
    machine.slower = 3.0
    for _ in range(10):
        run.step()
    assert run.step().items[-1].kind == "prefill"
    assert run.steps[-1][1] < MARGIN * WANTED_S
    machine.slower = 1.0
    for _ in range(30):
        run.step()
    assert run.steps[-1][1] > WANTED_S / MARGIN, "and back"


def test_a_prompt_gets_on_beside_a_crowd():
    """Whose own steps take longer than what is wanted: it may take as long again."""
    machine = Machine(decode_s=0.02)
    found = prompt_share(machine, PromptPace(WANTED_S, 2048), 8000, num_decoding=60)
    alone = 60 * machine.decode_s
    assert max(found) < MARGIN * 2 * alone
    later = found[len(found) // 2 : -1]
    assert sum(later) - len(later) * alone > 0.3 * sum(later)


def test_what_steps_took_before_does_not_let_prompts_take_it_all():
    pace = PromptPace(WANTED_S, 2048)
    decode, chunk = Item(0, 0, 5, 1, 0, "decode", True), Item(1, 1, 0, 16, 0, "prefill", False)
    pace.observe([decode], 10.0)  # of a machine that stood still, say
    for _ in range(20):
        pace.observe([decode, chunk], 0.05)
    assert pace.choose(1, 0) * 0.05 / 16 < 2 * 10.0
    for _ in range(30):
        pace.observe([decode], 0.01)
    assert pace.choose(1, 0) * 0.05 / 16 < 2.1 * WANTED_S


def test_at_first_a_few_rows():
    pace = PromptPace(WANTED_S, 2048)
    assert pace.choose(1, 0) == pace.choose(3, 15000) == 16
    assert PromptPace(WANTED_S, 7).choose(1, 0) == 7
    pace.observe([Item(0, 0, 0, 64, 0, "prefill", True)], 0.064)
    assert 64 < pace.choose(1, 0) < 80
    assert pace.choose(1, 64 * 1024) == 1, "each key may cost as much as those before it"


def test_several_long_prompts_that_fill_the_cache_beside_short_ones():
    """None fails, stands for ever or overtakes; who decodes gets its tokens in time."""
    run = Run(Machine(0.2), PromptPace(WANTED_S, 2048), num_pages=600)
    run.step(submit(0, 20, 16000))
    longs, shorts = range(1, 5), range(10, 20)
    messages = [submit(seq_id, 16000, 20) for seq_id in longs] + [submit(seq_id, 100, 20) for seq_id in shorts]
    run.step(*messages)
    while len(run.ended) < len(longs) + len(shorts):
        run.step()
        assert len(run.steps) < 5000, f"{run.ended=}"
    entered = [one.seq_id for plan, _ in run.steps for one in plan.entered]
    assert entered == [0, *longs, *shorts], "first come, first served"
    mixed = [
        seconds for plan, seconds in run.steps if plan.items[0].kind == "decode" and plan.items[-1].kind != "decode"
    ]
    assert max(mixed) < 1.5 * WANTED_S, "also when other contexts take turns"
    assert sum(mixed) > 0.8 * WANTED_S * len(mixed), "the time is used, though one that is not admitted is longer"
    assert not any(plan.preempted for plan, _ in run.steps)


class Timed:
    """A runner whose launches take made up seconds, and what other ranks are told."""

    def __init__(self, machine: Machine):
        self.machine, self.now, self.reported, self.tokens = machine, 0.0, [], {}

    def time(self, runner) -> None:
        launch = runner.launch

        def timed(plan, specs):
            self.now += self.machine.seconds(plan.items)
            launched = launch(plan, specs)
            self.tokens[plan.step] = launched.result.tokens
            return launched

        runner.launch = timed

    def broadcast(self, step, messages, specs, *, is_masked) -> None:
        self.reported.append((step, list(messages)))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("launch_ahead", [True, False])
def test_ranks_plan_the_same_and_answers_do_not_change(launch_ahead):
    timed, pace = Timed(Machine(slower=10.0)), PromptPace(WANTED_S, 64)
    core = {"pace": pace, "clock": lambda: timed.now, "ranks": timed}
    driver = CoreDriver(launch_ahead=launch_ahead, core=core)
    timed.time(driver.runner)
    driver.ask(5, max_tokens=150)
    driver.turn(3)
    for number in range(4):
        driver.ask(100 + number, max_tokens=3, seed=number)
    driver.run()
    driver.check()
    driver.check_empty()
    mixed = [plan for plan in driver.runner.plans if {item.kind for item in plan.items} == {"decode", "prefill"}]
    assert 1 < max(plan.num_tokens for plan in mixed) < 30, "a whole step is 64"
    replica, unread = Scheduler(driver.config), []
    for plan, (step, messages) in zip(driver.runner.plans, timed.reported, strict=True):
        replica.deliver(step, messages)
        assert replica.plan(step).items == plan.items
        unread += [step] * bool(plan.items)
        while len(unread) > (launch_ahead and bool(plan.items)):
            replica.apply(unread[0], timed.tokens[unread.pop(0)])


def test_where_prompts_are_cut_and_how():
    cost = StepCost.of(preset("glm-5"), 1.0, "cuda", 8)
    auto, none, given = (EngineConfig(max_inter_token_ms=ms) for ms in ("auto", None, 60))
    assert PromptShare.of(auto, "cpu", cost).pace.seconds == WANTED_S
    assert PromptShare.of(given, "cpu", cost).pace.seconds == 0.06
    assert "in 80 ms, by what steps took before" in str(PromptShare.of(auto, "cpu", cost))
    for config, device in ((auto, "cuda"), (none, "cuda"), (none, "cpu")):
        assert PromptShare.of(config, device, cost) == PromptShare()
    found = PromptShare.of(given, "cuda", cost)
    assert (found.pace, found.max_tokens) == (None, cost.rows_within(0.06, 2048))
    assert "in 60 ms, 8" in str(found)
