"""Asynchronous rollouts: random schedules on a counted clock, and broken variants that these schedules must catch."""

from pathlib import Path

import pytest

from glm5.rl.environments import mixture
from glm5.rl.orchestrator import dispatcher, sink
from glm5.rl.orchestrator.concurrency import AdaptiveConcurrency
from tests.support.mutants import at_most, mutants
from tests.support.rollout_schedules import Plan, Simulation

NUM_SCHEDULES = 40
EQUIVALENT = {
    "other sign: self.next_number += 1": "numbers need only differ from each other",
    "one more: self.next_number += 1": "numbers need only differ from each other",
    "one more: _STEP = 11400714819323198485": "only evens out a little less",
    "one more: self.change(0, weights)": "draw 0 is the first environment's, whatever the weights",
    "GtE turned: while self.changes and self.changes[-1][0] >= first:": "the later of two changes at a draw holds",
    "other sign: return names[min(bisect_right(ends, place), len(names) - 1)]": "only rounding gets there",
}


def test_random_schedules(seed):
    for number in range(NUM_SCHEDULES):
        Simulation(Plan(seed * 1_000_003 + number)).run()


@pytest.mark.long
def test_ten_thousand_schedules(seed):
    for number in range(10_000):
        Simulation(Plan(seed * 1_000_003 + number)).run()


@pytest.mark.long
@pytest.mark.parametrize(("module", "role"), [(dispatcher, "dispatching"), (sink, "sinking"), (mixture, "mixing")])
def test_every_broken_variant_is_caught(module, role):
    kept = {}
    for name, variant in mutants(Path(module.__file__)):
        kept[name.partition(": ")[2]] = all(passes(number, role, variant) for number in range(150))
    missed = {name for name, is_kept in kept.items() if is_kept}
    assert missed == {name for name in kept if name in EQUIVALENT}


def passes(number: int, role: str, variant: object) -> bool:
    try:
        with at_most(20):  # some variants have no end
            Simulation(Plan(number), **{role: variant}).run()
    except Exception:  # noqa: BLE001 - whatever a broken variant raises
        return False
    return True


def test_a_group_is_looked_at_once_for_each_version(monkeypatch):
    looked = list[int]()

    def is_trainable(ended: sink.Ended) -> bool:
        looked.append(ended.start.number)
        return True

    monkeypatch.setattr(sink, "_is_trainable", is_trainable)
    held = sink.Sink(1, "drop")
    for number in range(20):
        held.add(dispatcher.Start(number, number, "guess", 0), [])
        held.sweep(0)
        assert not held.has({"guess": 30})
    assert looked == list(range(20))
    held.sweep(1)
    assert looked == [*range(20), *range(20)]
    assert [one.start.number for one in held.take({"guess": 20})] == list(range(20))


def test_concurrency_follows_the_cache():
    some = AdaptiveConcurrency(allowed=16, least=4, most=64)
    some.observe(0.3)
    assert some.allowed == 16  # no episode has ended since
    for _ in range(16):
        some.episode_ended()
    some.observe(0.3)
    assert some.allowed == 20
    some.observe(0.7)
    assert some.allowed == 20
    some.observe(0.9)
    assert some.allowed == 13
    for _ in range(20):
        some.observe(1.0)
    assert some.allowed == 4
    for _ in range(50):
        for _ in range(64):
            some.episode_ended()
        some.observe(0.1)
    assert some.allowed == 64
