"""What the first rank tells the others, obeyed in this process by followers whose runners have no model."""

import io
from concurrent.futures import Future
from pathlib import Path

import pytest

from glm5.common.errors import CheckpointError, GlmError
from glm5.engine.distributed.follower import Follower
from glm5.engine.distributed.rank_wire import Masks, Order, PlanStep, RankReply, encoded, read_all
from glm5.engine.distributed.ranks import RankedCache, RankedRunner, RankedWeights, Ranks
from glm5.engine.sampling.params import StructuredOutputsParams
from glm5.engine.scheduler.messages import CopyDone
from glm5.engine.transport.wire import AbortRequests
from tests.support.core_driver import CoreDriver
from tests.support.fake_runner import TORN, FakeRunner, FakeWeights, ended
from tests.unit.engine.sampling.schemas import compiler, vocabulary
from tests.unit.engine.test_core_push import push


class Pages:
    """Nothing is loaded."""

    def share(self, messages) -> None:
        assert not any(isinstance(message, CopyDone) for message in messages)

    def expect(self, plan) -> None:
        assert not plan.loads


class EncodedRanks:
    """Ranks to whom orders go as bytes, as they do through a pipe."""

    def __init__(self, driver: CoreDriver):
        runner, config = driver.runner, driver.config
        self.orders: list[Order] = []
        self.runner = FakeRunner(
            driver.weights,
            num_pages=config.num_pages,
            page_size=config.page_size,
            vocab_size=driver.vocab_size,
            max_depth=config.max_depth,
        )
        self.said: Future[RankReply] = Future()
        others = {"weights": driver.weights, "cache": self.runner, "pages": Pages()}
        others["send_reply"] = lambda said: self.said.set_result(said)
        self.follower = Follower(self.runner, config, **others)
        driver.core.runner = driver.core.ranks = RankedRunner(runner, self, Pages())

    def broadcast(self, order: Order) -> None:
        (read,) = read_all(io.BytesIO(encoded(order)))
        self.orders.append(read)
        self.follower.execute(read)

    def call(self, make) -> "list[Future[RankReply]]":
        self.said = Future()
        self.broadcast(make(0))
        return [self.said]

    def close(self) -> None:
        pass


def test_others_hear_of_a_request_before_this_rank_plans():
    """They plan and launch meanwhile."""
    driver = CoreDriver(max_depth=2)
    sender, plan, received = EncodedRanks(driver), driver.core.scheduler.plan, []

    def planning(step):
        received.append((step, [order.step for order in sender.orders if isinstance(order, PlanStep)]))
        return plan(step)

    driver.core.scheduler.plan = planning
    driver.ask(30, 6)
    driver.ask(9, 4)
    driver.run()
    driver.check()
    assert received
    assert all(turns[-1] == step for step, turns in received)


@pytest.mark.parametrize("launch_ahead", [True, False])
def test_masks_reach_ranks_that_have_planned_already(launch_ahead):
    """A runner that had no mask for a grammar's rows, or another one, would fail."""
    driver = CoreDriver(compiler=compiler(), launch_ahead=launch_ahead, max_depth=2)
    sender = EncodedRanks(driver)
    wanted, stops = StructuredOutputsParams(choice=["ada", "grace"]), tuple(vocabulary().eos_ids)
    (constrained,) = driver.ask(5, max_tokens=20, stop_ids=stops, structured_outputs=wanted)
    (plain,) = driver.ask(9, max_tokens=40)
    while driver.core.has_work:  # compiling takes real time
        driver.num_turns = 0
        driver.turn()
    driver.check(plain)
    assert driver.received[constrained].reason == "stop"
    masked = [order for order in sender.orders if isinstance(order, Masks)]
    assert any(order.masks is not None for order in masked)
    assert len(masked) == sum(order.is_masked for order in sender.orders if isinstance(order, PlanStep))
    assert not sender.follower.scheduler.live


def test_a_request_may_be_dropped_in_the_turn_that_it_came():
    driver = CoreDriver()
    sender = EncodedRanks(driver)
    driver.ask(8, 4)
    (gone,) = driver.ask(8, 4)
    driver.core.receive(AbortRequests((gone,)))
    driver.run()
    assert driver.received[gone].reason == "abort"
    assert not sender.follower.scheduler.live


def test_a_rank_that_draws_other_tokens_says_so():
    """Before it plans with them."""
    driver = CoreDriver()
    sender = EncodedRanks(driver)
    sender.runner.weights = FakeWeights()
    sender.runner.weights.number = 1
    sender.runner.weights_changed()
    driver.ask(8, 6)
    with pytest.raises(RuntimeError, match="ranks differ in the tokens before step"):
        driver.run()


def test_weights_that_one_rank_refuses_are_kept_by_none():
    """They are as large as those in use."""
    sender, own = EncodedRanks(CoreDriver()), FakeWeights()
    own.at_once = False
    staged = RankedWeights(own, sender).stage(Path("/7"))
    assert sender.follower._staged.result() == 7
    own.staging.set_exception(CheckpointError("this part has NaN"))
    with pytest.raises(CheckpointError, match="this part"):
        staged.result()
    assert sender.follower._staged is None


def test_a_push_is_written_and_ended_on_every_rank():
    driver = CoreDriver()
    both = RankedWeights(FakeWeights(), EncodedRanks(driver))
    assert both.prepare(push(1, "7", "7")).result()
    both.write(0).result()
    assert (both._own.number, driver.weights.number) == (TORN, TORN)
    both.end_push(3)
    assert (both._own.number, driver.weights.number, driver.weights.version) == (7, 7, 3)


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_push_that_one_rank_refuses_fails(where, monkeypatch):
    driver, own = CoreDriver(), FakeWeights()
    both = RankedWeights(own, EncodedRanks(driver))
    refuse = ended(None, CheckpointError("this part has NaN"))
    monkeypatch.setattr(own if where == "here" else driver.weights, "write", lambda _: refuse)
    with pytest.raises(CheckpointError, match="x is no number"):
        both.prepare(push(1, "x")).result()
    both.prepare(push(2, "7")).result()
    with pytest.raises(CheckpointError, match="this part has NaN"):
        both.write(0).result()


@pytest.mark.parametrize("where", ["here", "there"])
def test_memory_that_one_rank_cannot_have_again_is_taken_by_none(where, monkeypatch):
    sender = EncodedRanks(CoreDriver())
    own = FakeRunner(FakeWeights(), num_pages=4, page_size=4, vocab_size=8, max_depth=0)
    cache = RankedCache(own, sender)
    assert cache.release_memory() == 2 * 8 * 5 * 4 + sender.runner.pool.numel() * 8
    with monkeypatch.context() as patch:
        patch.setattr(own if where == "here" else sender.runner, "restore_memory", refused)
        with pytest.raises(GlmError, match="no memory"):
            cache.restore_memory()
    assert (own.is_released, sender.runner.is_released) == (True, True)
    cache.restore_memory()
    assert (own.is_released, sender.runner.is_released) == (False, False)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_one_rank_cannot_have_again_sleep_as_before(level, monkeypatch):
    """What level 1 keeps on the host is not dropped."""
    driver = CoreDriver()
    sender, own = EncodedRanks(driver), FakeWeights()
    both = RankedWeights(own, sender)
    both.release(level)
    with monkeypatch.context() as patch:
        patch.setattr(driver.weights, "restore", refused)
        with pytest.raises(GlmError, match="no memory"):
            both.restore()
    assert (own.level, driver.weights.level) == (level, level)
    assert both.restore() == (level == 2)


def refused() -> None:
    raise GlmError("there is no memory")


def test_an_order_is_written_once_for_all_ranks():
    class Rank:
        def send(self, data: bytes) -> None:
            written.append(data)

    written, ranks = [], object.__new__(Ranks)
    ranks._others = [Rank(), Rank(), Rank()]
    ranks.broadcast(Masks(None))
    assert len(written) == 3
    assert all(data is written[0] for data in written)
    assert list(read_all(io.BytesIO(b"".join(written)))) == [Masks(None)] * 3
