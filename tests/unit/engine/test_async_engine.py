"""AsyncEngine: requests of many coroutines share steps, leaving aborts, and a failure reaches everyone."""

import asyncio
import threading

import pytest

from glm5.common.errors import EngineDead, RequestError
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.sampling.params import SamplingParams
from tests.support.engines import assert_nothing_left

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = GREEDY.but(max_tokens=None)


async def answer(engine, prompt, params=GREEDY, **options) -> list[int]:
    async with engine.generate(prompt, params, **options) as deltas:
        return [token async for delta in deltas for token in delta.token_ids]


class Gate:
    """Replaces `model.head`: each call waits until the test lets it pass, so the test decides when a step happens."""

    def __init__(self, model):
        self.head, self.permits, self.error = model.head, threading.Semaphore(0), None

    def __call__(self, hidden):
        self.permits.acquire()
        if self.error is not None:
            raise self.error
        return self.head(hidden)

    def open(self):
        self.permits.release(10_000)


@pytest.fixture
def llm(make_llm):
    return make_llm()


@pytest.fixture
def one_seat(make_llm):
    return make_llm(max_num_seqs=1)


@pytest.fixture
def gate(request, monkeypatch):
    """Of the engine that the test has, `llm` or `one_seat`."""
    llm = request.getfixturevalue("one_seat" if "one_seat" in request.fixturenames else "llm")
    model = llm.client.link.core.runner.model
    gate = Gate(model)
    monkeypatch.setattr(model, "head", gate)
    return gate


def test_concurrent_requests_get_their_own_answers(make_llm):
    prompts = [[i + 1] * (3 + 7 * i) for i in range(7)]
    want = [out.outputs[0].token_ids for out in make_llm().generate(prompts, GREEDY, use_tqdm=False)]

    async def main(engine):
        return await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))

    with AsyncEngine(make_llm()) as engine:
        assert asyncio.run(main(engine)) == want
        assert asyncio.run(main(engine)) == want  # from another event loop


def test_a_request_joins_while_another_runs(make_llm):
    async def main(engine):
        async with engine.generate([1, 2, 3], ENDLESS) as endless:
            await anext(endless)
            joined = await answer(engine, [4, 5])  # would never come if it had to wait
            return joined, await anext(endless)

    with AsyncEngine(make_llm(max_model_len=1024)) as engine:
        joined, delta = asyncio.run(main(engine))
    assert len(joined) == 12
    assert delta.finish_reason is None


def test_leaving_the_block_aborts(one_seat):
    """One seat: the second request can only run because the first one, which has no end, gave its seat up."""

    async def main(engine):
        for _ in range(3):
            async with engine.generate([1, 2, 3], ENDLESS) as deltas:
                await anext(deltas)
        return await answer(engine, [4, 5])

    with AsyncEngine(one_seat) as engine:
        assert len(asyncio.run(main(engine))) == 12
    assert_nothing_left(one_seat)


def test_abort_by_id_from_elsewhere(one_seat):
    """The answers end, each once; other requests, and ids that are none, are nobody's loss."""

    async def main(engine):
        two = SamplingParams(n=2, temperature=1.0, max_tokens=None, ignore_eos=True)
        async with engine.generate([1, 2, 3], two, request_id="a") as deltas:
            await anext(deltas)
            assert engine.abort("b") == 0
            assert engine.abort("a") == 1
            rest = [delta async for delta in deltas]
        assert engine.abort("a") == 0
        return [delta.index for delta in rest if delta.finish_reason == "abort"], await answer(engine, [4, 5])

    with AsyncEngine(one_seat) as engine:
        aborted, joined = asyncio.run(main(engine))
    assert sorted(aborted) == [0, 1]
    assert len(joined) == 12
    assert_nothing_left(one_seat)


def test_an_id_that_several_requests_have_is_a_name_for_all_of_them(make_llm):
    """Each has its own answer; one that is left ends alone; by the id all end, each once."""
    prompts = [[1, 2, 3], [4, 5]]
    want = [out.outputs[0].token_ids for out in make_llm().generate(prompts, GREEDY, use_tqdm=False)]

    async def main(engine):
        got = await asyncio.gather(*(answer(engine, prompt, request_id="a") for prompt in prompts))
        async with engine.generate([6], ENDLESS, request_id="a") as stays:
            async with engine.generate([7], ENDLESS, request_id="a") as leaves:
                await anext(leaves)
            await anext(stays)
            async with engine.generate([8], ENDLESS, request_id="a") as other:
                await anext(other)
                assert engine.abort("a") == 2
                ends = [[delta.finish_reason async for delta in deltas][-1] for deltas in (stays, other)]
        return got, ends, engine.abort("a")

    llm = make_llm(max_model_len=1024)
    with AsyncEngine(llm) as engine:
        got, ends, left = asyncio.run(main(engine))
    assert (got, ends, left) == (want, ["abort", "abort"], 0)
    assert_nothing_left(llm)


def test_cancelling_the_waiting_task_aborts(llm, gate):
    async def main(engine):
        task = asyncio.create_task(answer(engine, [1, 2], ENDLESS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        return await answer(engine, [4, 5])

    with AsyncEngine(llm) as engine:
        assert len(asyncio.run(main(engine))) == 12
    assert_nothing_left(llm)


def test_a_failure_in_the_loop_reaches_all_that_wait_and_all_that_come(llm, gate, caplog):
    gate.error = MemoryError("no room")

    async def main(engine):
        tasks = [asyncio.create_task(answer(engine, [i + 1] * 3)) for i in range(6)]  # more than there are seats
        await asyncio.sleep(0)
        gate.open()
        return [*await asyncio.gather(*tasks, return_exceptions=True),
                *await asyncio.gather(answer(engine, [1]), return_exceptions=True)]  # fmt: skip

    engine = AsyncEngine(llm)
    with engine:
        failures = asyncio.run(main(engine))
        assert [type(failure) for failure in failures] == [EngineDead] * 7
        assert all("MemoryError: no room" in str(failure) for failure in failures)
        assert not engine.is_ready
        assert engine.stopped_because.startswith("MemoryError: no room; out of memory: lower ")
    assert "the engine stopped" in caplog.text
    assert llm.client.num_unfinished == 0


def test_closing_ends_what_runs_and_refuses_what_comes(one_seat, gate):
    async def main(engine):
        async with engine.generate([1, 2, 3], ENDLESS) as running, engine.generate([4], ENDLESS) as waiting:
            closing = asyncio.create_task(asyncio.to_thread(engine.close))
            while not closing.done():  # one step after another, until the thread has read that it is to close
                gate.permits.release()
                await asyncio.wait([closing], timeout=0.01)
            reasons = [[delta.finish_reason async for delta in deltas][-1] for deltas in (running, waiting)]
        with pytest.raises(EngineDead, match="the engine is not running: it was closed"):
            await answer(engine, [1])
        return reasons

    with AsyncEngine(one_seat) as engine:
        assert asyncio.run(main(engine)) == ["abort", "abort"]
    assert one_seat.client.num_unfinished == 0


def test_not_started(llm):
    engine = AsyncEngine(llm)
    assert not engine.is_ready
    with pytest.raises(EngineDead, match="it was not started"):
        asyncio.run(answer(engine, [1]))
    engine.close()


def test_bad_requests_are_refused_at_the_door(llm):
    with AsyncEngine(llm) as engine, pytest.raises(RequestError, match="the prompt has 64 tokens"):
        asyncio.run(answer(engine, [1] * 64))


@pytest.mark.parametrize("ids", [[1.5], [1, "a"], [True], [None]])
def test_what_is_no_token_id_does_not_reach_the_model(llm, ids):
    with AsyncEngine(llm) as engine:
        with pytest.raises(RequestError, match="allowed: token ids"):
            engine.check(ids, SamplingParams())
        assert engine.stopped_because is None


def test_an_event_loop_that_is_gone_does_not_stop_the_engine(one_seat, gate):
    """Its coroutine never left the block, so nobody aborts; the engine finds out when it delivers."""
    with AsyncEngine(one_seat) as engine:
        event_loop = asyncio.new_event_loop()
        scope = engine.generate([1, 2], ENDLESS)
        event_loop.run_until_complete(scope.__aenter__())
        event_loop.close()
        gate.open()
        assert len(asyncio.run(answer(engine, [4, 5]))) == 12


def test_async_with_and_a_plain_loop(llm, make_llm):
    want = make_llm().generate([1, 2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    async def main():
        async with AsyncEngine(llm) as engine:
            return [token async for delta in engine.generate([1, 2], GREEDY) for token in delta.token_ids]

    assert asyncio.run(asyncio.wait_for(main(), 60)) == want
    with pytest.raises(EngineDead, match="it was closed"):
        llm.client.check_alive()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_params": GREEDY}, "sampling_params is no option of a request; allowed: priority, "),
        ({"priority": "x"}, "priority is 'x'; allowed"),
        ({"request_id": 5}, "request_id is 5; allowed: a text"),
    ],
)
def test_options_that_do_not_exist(llm, options, message):
    async def main():
        with AsyncEngine(llm) as engine:
            with pytest.raises(RequestError, match=message):
                await answer_with(engine, options)
            assert not engine.abort("5")

    asyncio.run(asyncio.wait_for(main(), 60))


async def answer_with(engine, options):
    async with engine.generate([1], GREEDY, **options) as deltas:
        return [delta async for delta in deltas]


def test_requests_of_one_turn_are_one_message(llm, monkeypatch):
    sent, send = list[list[str]](), llm.client.link.send

    def record(*messages):
        sent.append([type(message).__name__ for message in messages])
        send(*messages)

    async def main():
        return await asyncio.gather(*[answer(engine, [i + 1]) for i in range(300)])

    monkeypatch.setattr(llm.client.link, "send", record)
    with AsyncEngine(llm) as engine:
        assert {len(ids) for ids in asyncio.run(main())} == {12}
    # 256 of them are held at most.
    assert sent == [["AddRequest"] * 257, ["AddRequest"] * 43, ["Close"]]


def test_requests_that_cannot_be_sent_fail(llm, monkeypatch):
    async def main():
        return await asyncio.gather(*[answer(engine, [i + 1]) for i in range(3)], return_exceptions=True)

    with AsyncEngine(llm) as engine:
        monkeypatch.setattr(llm.client.link, "send", lambda *messages: 1 / 0)
        failures = asyncio.run(main())
        assert [type(failure) for failure in failures] == [EngineDead] * 3
        assert "division by zero" in str(failures[0])
        monkeypatch.undo()
