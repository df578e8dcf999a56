"""Several clients of one engine process: each gets its own answers, and what a client leaves behind is aborted."""

import asyncio
import tempfile
from functools import partial
from pathlib import Path

import pytest

from glm5.checkpoint.init import write_random
from glm5.common.errors import EngineDead
from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.joined import JoinedLLM, forget, share
from glm5.engine.llm import LLM
from glm5.engine.process import _by_client
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.joined import JoinedLink
from glm5.engine.transport.wire import (
    AbortRequests,
    AddRequest,
    Growth,
    Join,
    Leave,
    PauseCall,
    TokenLogprobs,
    Update,
    Updates,
    client_of,
    first_id,
    sender_of,
)
from tests.support.core_driver import CoreDriver, ReceivedAnswer
from tests.support.cores import scripted_start
from tests.support.updates import updates_of

PLAIN = SamplingParams(max_tokens=8, ignore_eos=True)
ENDLESS = PLAIN.but(max_tokens=None)
SECONDS = 60  # an upper limit for what takes a moment


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("joined") / "tiny"
    write_random(preset("tiny"), path, seed=3)
    return path


@pytest.fixture
def owner(checkpoint, monkeypatch):
    """The engine of the process that started it, and the folder through which others join it."""
    monkeypatch.setattr("glm5.engine.llm.Start", partial(scripted_start, "ok"))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, AsyncEngine(LLM(checkpoint)) as engine:
        share(engine.llm.client.link, folder)
        yield engine, folder


def join(checkpoint, folder, client) -> tuple[AsyncEngine, JoinedLink]:
    link = JoinedLink(folder, client)
    return AsyncEngine(JoinedLLM(link, checkpoint, generation_config="vllm", seed=0, table=[("a", "b")])), link


async def answer(engine, prompt, params=PLAIN):
    async with engine.generate(prompt, params) as deltas:
        return [token_id async for delta in deltas for token_id in delta.token_ids]


def test_each_client_gets_its_own_answers(checkpoint, owner):
    engine, folder = owner
    joined = [join(checkpoint, folder, client)[0] for client in (1, 2)]

    async def main():
        clients = [engine, *joined]
        prompts = [[first + 10 * number] for number in range(3) for first in (5, 100)]
        found = await asyncio.gather(*[answer(clients[i % 3], prompt) for i, prompt in enumerate(prompts)])
        assert found == [list(range(prompt[-1] + 1, prompt[-1] + 9)) for prompt in prompts]
        pids = {(await one.stats())["pid"] for one in clients}
        assert pids == {engine.llm.client.link.pid}
        # One client's pause holds for all of them, and so does its end.
        await joined[0].pause()
        waiting = asyncio.ensure_future(answer(joined[1], [7]))
        await engine.resume()
        assert await waiting == list(range(8, 16))

    with joined[0], joined[1]:
        asyncio.run(main())
        assert dict(joined[0].table) == {"a": "b"}
    assert joined[0].stopped_because == "it was closed"
    assert engine.stopped_because is None


def test_what_a_client_leaves_behind_is_aborted(checkpoint, owner):
    engine, folder = owner
    (leaving, link), (staying, _) = join(checkpoint, folder, 1), join(checkpoint, folder, 2)

    async def main():
        await engine.pause()  # no answer grows, so none ends by itself
        async with leaving.generate([5], ENDLESS), staying.generate([5], ENDLESS):
            while (await engine.stats())["running"] < 2:
                pass
            forget(engine.llm.client.link, 1)
            while (await engine.stats())["running"] > 1:
                pass
            # It sends on as if it had not heard: nothing of it counts any more.
            link.send(AddRequest((first_id(1) + 9,), [9], ENDLESS, (1,), 1000))
            link.send(Join(1))
            for _ in range(20):
                assert (await staying.stats())["running"] == 1
        await engine.resume()

    with leaving, staying:
        asyncio.run(main())


def test_the_end_of_the_engine_is_told_with_its_reason(checkpoint, owner):
    engine, folder = owner
    joined, link = join(checkpoint, folder, 1)

    async def main():
        await engine.pause()  # the answer does not end by itself
        async with joined.generate([5], ENDLESS) as deltas:
            while (await engine.stats())["running"] < 1:
                pass
            link.end("its process was killed")
            with pytest.raises(EngineDead, match="its process was killed"):
                async for _ in deltas:
                    pass
        with pytest.raises(EngineDead, match="its process was killed"):
            await joined.stats()

    with joined:
        asyncio.run(main())
    assert joined.stopped_because == "its process was killed"


def test_a_client_that_waits_for_the_engine_learns_of_its_end(tmp_path, checkpoint):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        link = JoinedLink(folder, 1)  # nobody answers there
        link.end("it died")
        with pytest.raises(EngineDead, match="it died"):
            JoinedLLM(link, checkpoint, generation_config="vllm", seed=0, table=[])


def test_ids_tell_their_client():
    assert (first_id(0), client_of(1), client_of(first_id(1) - 2)) == (1, 0, 0)
    assert client_of(first_id(7)) == client_of(first_id(8) - 2) == 7
    message = AddRequest((first_id(3),), [1], PLAIN, (1,), 1)
    assert (sender_of(message), sender_of(PauseCall(first_id(4))), sender_of(AbortRequests())) == (3, 4, None)


def test_the_core_aborts_what_a_client_left():
    driver = CoreDriver()
    (kept,) = driver.ask(8, max_tokens=20)
    ids = (first_id(5), first_id(5) + 1)
    message = AddRequest(ids, driver.prompt(8, 1), SamplingParams(), (1, 2), 50)
    driver.received |= {seq_id: ReceivedAnswer(message, 1) for seq_id in ids}
    driver.core.receive(message)
    driver.turn(3)
    driver.core.receive(Leave(5))
    driver.run()
    driver.check(kept)
    assert [driver.received[seq_id].reason for seq_id in ids] == ["abort", "abort"]
    driver.check_empty()


def test_columns_of_a_step_are_divided_by_client(rng):
    """As the same updates one by one, whatever was reported of which answer."""
    for reported in ((), ("logprobs",), ("sampling_mask",), ("logprobs", "sampling_mask")):
        for most in (1, 3):
            expected, growth = list[Update](), Growth(7, [], [], [])
            for number in range(40):
                count = rng.randint(1, most)
                update = Update(first_id(rng.randrange(3)) + number, [rng.randrange(100) for _ in range(count)], 7)
                if "logprobs" in reported and rng.random() < 0.7:
                    update.logprobs = [TokenLogprobs(one, -rng.random(), -rng.random(), 1) for one in update.token_ids]
                if "sampling_mask" in reported and rng.random() < 0.7:
                    update.sampling_mask = [rng.randbytes(4) for _ in update.token_ids]
                growth.seq_ids.append(update.seq_id)
                growth.token_ids += update.token_ids
                growth.counts += [count] if most > 1 else []
                growth.logprobs += (update.logprobs or [None] * count) if "logprobs" in reported else []
                growth.sampling_mask += (update.sampling_mask or [None] * count) if "sampling_mask" in reported else []
                expected.append(update)
            assert list(growth.updates()) == expected
            parts = _by_client(Updates([], growth))
            for client in range(3):
                assert list(updates_of(parts[client])) == [one for one in expected if client_of(one.seq_id) == client]
