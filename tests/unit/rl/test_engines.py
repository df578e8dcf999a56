"""Several engines: which plays which group, and what becomes of a group whose engine ends."""

import asyncio
import json
from contextlib import nullcontext
from random import Random
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from glm5.checkpoint.versions import WeightFolder
from glm5.common.errors import CheckpointError, ConfigError, EngineDead
from glm5.config.rl import Rollouts
from glm5.engine.frontend.outputs import Delta
from glm5.rl.loop import run
from glm5.rl.rollouts.engines import RESTARTS, Engines
from glm5.rl.rollouts.policy import Policy
from glm5.rl.rollouts.ring import BALANCE, HashRing
from tests.support.rl_recipe import small_recipe
from tests.support.routing import rows
from tests.support.whole_runs import killing_engine, steps_of, weights_of

TWO = 'rollouts.devices=["cpu", "cpu"]'


def ring_of(count: int) -> HashRing:
    ring = HashRing()
    for member in range(count):
        ring.add(member)
    return ring


def test_no_member_is_far_above_the_mean_and_keys_stay(seed):
    random, ring = Random(seed), ring_of(5)
    placed = dict[int, int]()
    for key in range(2000):
        placed[key] = ring.place(key)
        assert max(ring.loads.values()) <= BALANCE * len(placed) / 5 + 1
        if len(placed) > 100:
            gone = random.choice(list(placed))
            assert ring.place(gone) == placed.pop(gone)
            ring.release(gone)
    assert sum(ring.loads.values()) == len(placed)
    assert all(ring.place(key) == member for key, member in placed.items())


def test_a_member_that_leaves_moves_its_own_keys_alone():
    ring = ring_of(4)
    before = {key: ring.place(key) for key in range(200)}
    ring.remove(2)
    after = {key: ring.place(key) for key in range(200)}
    assert {key for key in before if before[key] != after[key]} == {key for key in before if before[key] == 2}
    ring.add(2)
    assert {key: ring.place(key) for key in range(200)} == after  # what is there stays
    assert [ring.place(key) for key in range(1000, 1100)].count(2) > 25  # the emptiest takes more than its share


def test_hashing_alone_would_not_be_balanced(monkeypatch):
    """Control: without the bound the fullest of five members has more than 1.25 times the mean."""
    monkeypatch.setattr("glm5.rl.rollouts.ring.BALANCE", 100.0)
    monkeypatch.setattr("glm5.rl.rollouts.ring.POINTS", 8)
    ring = ring_of(5)
    for key in range(1000):
        ring.place(key)
    assert max(ring.loads.values()) > 1.25 * 200


def test_what_a_death_has_piled_up_is_spread_again():
    ring = ring_of(2)
    for key in range(40):
        ring.place(key)
    ring.remove(0)
    for key in range(40):
        ring.place(key)
    ring.add(0)
    assert ring.loads == {0: 0, 1: 40}
    assert ring.rebalance() == 15
    assert ring.loads == {0: 15, 1: 25}
    assert ring.rebalance() == 0


def test_keys_that_move_keep_their_loads():
    ring = ring_of(2)
    for key in range(4):
        ring.place(key, 16)
    ring.remove(0)
    assert ring.loads == {1: 64}
    for key in range(4):
        ring.release(key)
    assert ring.loads == {1: 0}


def test_a_ring_without_members_says_so():
    with pytest.raises(LookupError, match="no members"):
        HashRing().place(1)


class Scripted:
    """An engine whose tokens count up from the last one of the prompt; `ends_after`: tokens that it gives in all."""

    info = SimpleNamespace(vocab_size=1000)

    def __init__(self, ends_after: float = float("inf")) -> None:
        self.left, self.stopped_because, self.asked = ends_after, None, list[list[int]]()
        self.version, self.is_closed, self.nonsense = 0, False, {}

    @property
    def is_ready(self) -> bool:
        return self.stopped_because is None

    def start(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    def kill(self, reason: str) -> None:
        self.stopped_because = reason

    async def update_weights(self, source, *, policy, version, max_key_age, channel) -> None:
        if self.stopped_because:
            raise EngineDead(self.stopped_because)
        self.version = version

    async def stats(self):
        return {"last_push": {"seconds": 0.1}, "pages": {"in_use": 1, "all": 2}}

    def generate(self, prompt_ids, params, **_):
        self.asked.append(list(prompt_ids))
        return Answers(self, prompt_ids[-1], params)


class Answers:
    def __init__(self, engine: Scripted, last: int, params) -> None:
        self.engine, self.last, self.params = engine, last, params

    async def __aenter__(self):
        return self.deltas()

    async def __aexit__(self, *_) -> None: ...

    async def deltas(self):
        for place in range(1, self.params.max_tokens + 1):
            for index in range(self.params.n):
                if self.engine.left <= 0:
                    self.engine.stopped_because = "it was killed"
                    raise EngineDead("it was killed")
                self.engine.left -= 1
                end = "length" if place == self.params.max_tokens else None
                values = {"tempered_logprobs": (-1.0,), "version": self.engine.version}
                values |= {"token_ids": (self.last + place,)} | (self.engine.nonsense if place == 3 else {})
                ids = values.pop("token_ids")
                yield Delta(ids, (), end, index=index, **values)
        await asyncio.sleep(0)


def scripted(*ends_after: float) -> tuple[Engines, list[Scripted]]:
    made = list[Scripted]()

    def make(number: int) -> Scripted:
        made.append(Scripted(ends_after[number] if len(made) < len(ends_after) else float("inf")))
        return made[-1]

    engines = Engines(make, len(ends_after))
    engines.start()
    return engines, made


def test_all_start_at_the_same_time_and_errors_are_told():
    """The control: engines that start in turn would wait for each other."""
    together = Barrier(3)

    class Starting(Scripted):
        def __init__(self, error: Exception | None) -> None:
            super().__init__()
            self.error = error

        def start(self) -> None:
            together.wait(60)
            if self.error is not None:
                raise self.error

    cases = (0, None, [0, 1, 2]), (1, EngineDead("no memory"), [0, 2]), (0, OSError("full"), [1, 2])
    for broken, error, left in cases:
        errors = {broken: error}
        engines = Engines(lambda number, errors=errors: Starting(errors.get(number)), 3)
        with pytest.raises(OSError, match="full") if isinstance(error, OSError) else nullcontext():
            engines.start()
        assert sorted(engines._all) == left


CFG = Rollouts(groups=1, group_size=4, max_tokens=20, max_model_len=100)


async def replies(engines: Engines, key: int, count: int = 4) -> list:
    with engines.held(key, count):
        return [one async for one in Policy(engines, CFG).replies([1, 2, 3], 7, count, key)]


def test_an_engine_that_lacks_the_base_of_changes_is_sent_all_weights(tmp_path, caplog):
    """One of two engines is started again; the folder has the others' changes, and once all weights."""
    sent = list[tuple[int, bool]]()

    class Reader(Scripted):
        held: str | None = None

        async def update_weights(self, source, *, policy, version, max_key_age, channel) -> None:
            marker = json.loads(source.read_text())
            if marker["base"] not in (None, self.held):
                raise CheckpointError("changes to other weights")
            self.version, self.held = version, marker["id"]
            sent.append((version, marker["base"] is None))

    made = list[Reader]()

    def make(_: int) -> Reader:
        made.append(Reader())
        return made[-1]

    engines = Engines(make, 2, files=WeightFolder(tmp_path / "weights", deltas=True))
    engines.start()

    async def run():
        for version in (1, 2):
            await engines.update_weights({"model.norm.weight": torch.ones(8) * version}, policy="keep", version=version)
        made[0].held = None  # as of one that was started again
        for version in (3, 4):
            await engines.update_weights({"model.norm.weight": torch.ones(8) * version}, policy="keep", version=version)
        await engines.close()

    asyncio.run(run())
    assert sorted(sent) == [(1, True), (1, True), (2, False), (2, False), (3, False), (3, True), (4, False), (4, False)]
    assert "changes to other weights; all weights are sent" in caplog.text
    assert not list((tmp_path / "weights").iterdir())


def test_what_an_engine_was_asked_goes_on_elsewhere_with_its_tokens():
    engines, made = scripted(float("inf"), float("inf"))

    async def play():
        engines.of(5).left = 30  # of 80: it ends in the middle of each answer
        found = await replies(engines, 5)
        await engines.update_weights({}, policy="recompute", version=1)
        return found

    found = asyncio.run(play())
    assert sorted(index for index, _, _ in found) == [0, 1, 2, 3]
    for _, _, sampled in found:
        assert sampled.token_ids == list(range(4, 24))  # none lost, none twice
        assert (len(sampled.logprobs), len(sampled.versions), sampled.is_truncated) == (20, 20, True)
    asked = [len(prompt) for engine in made for prompt in engine.asked if len(prompt) > 3]
    assert min(asked) >= 3 + 7


@pytest.mark.parametrize(
    "nonsense",
    [
        {"token_ids": (1000,)},
        {"token_ids": (-1,)},
        {"tempered_logprobs": (float("nan"),)},
        {"tempered_logprobs": (float("-inf"),)},
        {"tempered_logprobs": (0.1,)},
        {"tempered_logprobs": ()},
    ],
)
def test_an_engine_that_answers_nonsense_is_taken_out(nonsense):
    engines, _ = scripted(float("inf"), float("inf"))
    bad = engines.of(5)
    bad.nonsense = nonsense
    found = asyncio.run(replies(engines, 5))
    assert [sampled.token_ids for _, _, sampled in found] == [list(range(4, 24))] * 4
    assert all(sampled.logprobs == [-1.0] * 20 for _, _, sampled in found)
    assert "it answered" in bad.stopped_because
    assert engines.num_lost == 1
    # Alone it ends the request with the reason. Control: what it may answer.
    alone, (only,) = scripted(float("inf"))
    only.nonsense = {"tempered_logprobs": (1e-6,)}
    assert len(asyncio.run(replies(alone, 5))) == 4
    only.nonsense = nonsense
    with pytest.raises(EngineDead, match="it answered"):
        asyncio.run(replies(alone, 5))


def test_all_engines_ended():
    engines, _ = scripted(10, 10)
    with pytest.raises(EngineDead, match="it was killed"):
        asyncio.run(replies(engines, 5))


def test_an_engine_comes_back_with_the_next_push_or_not_at_all():
    engines, made = scripted(float("inf"), float("inf"))

    async def play():
        for lost in range(1, RESTARTS + 2):
            first = engines.of(0)
            first.stopped_because = "it was killed"
            other = engines.of(0)
            assert other is not first
            assert engines.alive == [other]
            await asyncio.sleep(0)
            while engines._starting and not all(task.done() for task in engines._starting.values()):
                await asyncio.sleep(0)
            assert engines.alive == [other]  # started, and it has no weights yet
            await engines.update_weights({}, policy="recompute", version=lost)
            assert {one.version for one in engines.alive} == {lost}
            if len(engines.alive) == 1:
                break
        await engines.close()

    asyncio.run(play())
    assert len(made) == 2 + engines.num_lost - (len(engines._all) == 1)
    assert all(one.is_closed for one in engines._all.values())


def test_devices_are_read(tmp_path):
    found = small_recipe(tmp_path, 'rollouts.devices=["cuda:1", "cuda", "cpu"]')
    assert found.rollouts.devices == ("cuda:1", "cuda", "cpu")
    with pytest.raises(ConfigError, match=r"rollouts.devices.0: got 'tpu'"):
        small_recipe(tmp_path, 'rollouts.devices=["tpu"]')


@pytest.mark.slow
def test_two_engines_learn_the_same_as_one(done, tmp_path):
    run(small_recipe(tmp_path, TWO))
    assert weights_of(tmp_path / "run") == weights_of(done / "run")


@pytest.mark.slow
def test_an_engine_that_is_killed_costs_nothing(tmp_path, monkeypatch, caplog):
    killing_engine(monkeypatch, [8])
    run(small_recipe(tmp_path, TWO, "steps=4"))
    lines = [line for line in steps_of(tmp_path / "run") if "reward/mean" in line]
    assert "its requests go on elsewhere" in caplog.text
    assert lines[-1]["engines/lost"] == 1
    assert all(line["logp/abs_diff_max"] == 0 for line in lines)
    assert all(line["group/dropped"] == line.get("env_fail/provider", 0) == 0 for line in lines)


@pytest.mark.long
def test_prompts_find_their_pages_on_four_engines():
    """64 agents whose prompts grow, weights pushed in between. Control: random routing."""
    (_, alone), (_, ring), (_, random) = rows()
    assert ring["hits"] >= 0.95 * alone["hits"]
    assert random["hits"] < 0.5 * alone["hits"]
    assert max(ring["busy"]) <= 1.25 * sum(ring["busy"]) / 4
