"""A trace of the engine: a file that shows its operators, and refusals that say what to do."""

import asyncio
import gzip
import json

import pytest

from glm5.common.errors import EngineDead, GlmError
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.core.profiling import Profiling
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from tests.support.models import random_model
from tests.support.tokenizers import tiny_tokenizer


@pytest.fixture(scope="module")
def engine():
    with AsyncEngine(LLM(random_model(11), tiny_tokenizer(), max_model_len=256)) as engine:
        yield engine


async def answer(engine, n=1):
    params = SamplingParams(max_tokens=3, ignore_eos=True, n=n)
    async with engine.generate([5, 6, 7], params) as deltas:
        return [delta async for delta in deltas]


def test_the_trace_shows_operators(engine, tmp_path):
    async def main():
        with pytest.raises(GlmError, match="start one first"):
            await engine.profile(None)
        await engine.profile(str(tmp_path / "traces"))
        with pytest.raises(GlmError, match="stop it first"):
            await engine.profile(str(tmp_path))
        await answer(engine)
        return await engine.profile(None)

    path = asyncio.run(main())
    with gzip.open(path, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "glm5::decoder_layers" in names or "aten::linear" in names  # in native code, or on torch


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GlmError, match="profiles cannot be written to "):
        Profiling().start(str(tmp_path / "file" / "folder"))


def test_deltas_say_when_they_came_and_how_long_their_request_waited(engine):
    deltas = asyncio.run(answer(engine, n=2))
    for answer_index in (0, 1):  # of two answers, tokens that came later may be read first
        times = [delta.arrived for delta in deltas if delta.index == answer_index]
        assert times == sorted(times)
        assert times[0] > 0
    waits = [delta.queued_s for delta in deltas if delta.queued_s is not None]
    assert waits
    assert 0 <= min(waits) <= max(waits) < max(delta.arrived for delta in deltas)


def test_a_killed_engine_tells_those_who_wait():
    engine = AsyncEngine(LLM(random_model(11), tiny_tokenizer(), max_model_len=1024))
    params = SamplingParams(ignore_eos=True)

    async def main():
        await engine.pause()  # the answer does not end by itself
        async with engine.generate([5], params) as deltas:
            while engine.llm.client.num_unfinished < 1:
                await asyncio.sleep(0)
            engine.kill()
            with pytest.raises(EngineDead, match="it was killed"):
                async for _ in deltas:
                    pass

    engine.start()
    asyncio.run(main())
    assert engine.stopped_because == "it was killed"
    engine.close()
