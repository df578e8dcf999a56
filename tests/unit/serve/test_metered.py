"""The engine as routes see it: bounds of one request, its time, its salt, and another engine in its place."""

import asyncio
import json

import pytest

from glm5.common.errors import RequestError
from glm5.engine.defaults import GenerationDefaults
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.generation.metered import Bounds, MeteredEngine
from glm5.serve.http.call import Call, begin
from glm5.serve.http.errors import ApiError
from glm5.serve.http.keys import Tenant
from glm5.serve.http.limits import Limits, OwnLimits
from glm5.serve.metrics.server_metrics import ServerMetrics
from tests.support.serving import ASK, CHAT, SECONDS, scripted, served


def metered(engine, limits=None, **bounds) -> MeteredEngine:
    return MeteredEngine(engine, ServerMetrics("tiny"), OwnLimits(limits or Limits()), Bounds(**bounds))


async def answer(engine, params=None, **options) -> list:
    async with engine.generate([1, 2, 3], params or SamplingParams(), **options) as deltas:
        return [delta async for delta in deltas]


def test_prompts_and_answers_have_bounds():
    engine = metered(scripted(), max_prompt_tokens=3, max_output_tokens=10)
    engine.check([1, 2, 3], SamplingParams(max_tokens=10))
    with pytest.raises(RequestError, match="the prompt has 4 tokens; allowed: up to 3 on this server") as caught:
        engine.check([1] * 4, SamplingParams(max_tokens=1))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="max_tokens is 11; allowed: up to 10 on this server") as caught:
        engine.check([1], SamplingParams(max_tokens=11))
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(("own", "want"), [({}, 10), ({"max_tokens": 7}, 7), ({"max_tokens": 70, "top_k": 3}, 10)])
def test_requests_that_do_not_say_get_the_longest_answer_that_is_allowed(own, want):
    engine = scripted()
    engine.defaults = GenerationDefaults(own, (3,))
    defaults = metered(engine, max_output_tokens=10).defaults
    assert defaults.sampling == own | {"max_tokens": want}
    assert defaults.eos_ids == (3,)
    assert metered(engine).defaults is engine.defaults


def test_bounds_over_http():
    engine = scripted("</think>x")
    with served(engine, max_output_tokens=50) as http:
        assert http.post(CHAT, json=ASK).status_code == 200
        assert engine.params.max_tokens == 50
        refused = http.post(CHAT, json=ASK | {"max_tokens": 51})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(stream):
    engine = scripted("a thought")
    engine.hangs = True
    with served(engine, request_timeout=0.2) as http:
        answer = http.post(CHAT, json=ASK | {"stream": stream})
        assert engine.left.wait(SECONDS)
    if stream:
        *_, last, done = [line for line in answer.text.splitlines() if line]
        assert (answer.status_code, done) == (200, "data: [DONE]")
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 504
        error = answer.json()["error"]
    assert error["code"] == "request_timeout"
    assert "0.2 s" in error["message"]


def test_time_runs_out_between_tokens_too():
    """Tokens that are there already never make the loop wait, so no timeout of it would ever fire."""
    engine = metered(scripted("a long thought"), seconds=1e-9)
    with pytest.raises(ApiError) as caught:
        asyncio.run(answer(engine))
    assert caught.value.code == "request_timeout"


def test_prompts_are_cached_under_the_salt_of_their_caller():
    inner = scripted("x")
    engine = metered(inner)

    async def requested(tenant, **options):
        begin(Call("1", tenant))
        await answer(engine, **options)
        return inner.options

    salts = [
        asyncio.run(requested(tenant, cache_salt=salt))["cache_salt"]
        for tenant in (Tenant("a", "key:1"), Tenant("b", "key:2"))
        for salt in ("", "own")
    ]
    assert salts == ["key:1/", "key:1/own", "key:2/", "key:2/own"]
    assert asyncio.run(requested(Tenant(), priority=3)) == {"cache_salt": "", "priority": 3}


def test_places_are_taken_for_every_answer():
    limits = Limits(4)
    engine = metered(scripted("x"), limits)
    refused = engine.metrics.refused

    async def requested(num_prompts, n):
        call = Call("1")
        limits.enter(call)
        begin(call)
        try:
            for _ in range(num_prompts):
                await engine.reserve(n)
            return limits.num_places
        finally:
            limits.leave(call)

    assert asyncio.run(requested(1, 1)) == 1
    assert asyncio.run(requested(2, 2)) == 4
    with pytest.raises(ApiError, match="the request asks for 6 answers; allowed: 4"):
        asyncio.run(requested(3, 2))
    assert limits.num_places == 0
    assert refused.value("400") == 1
    asyncio.run(engine.reserve(100))  # nobody's request: no limit


def test_another_engine_takes_its_place():
    first, second = scripted("first"), scripted("second")
    engine = metered(first)
    first.stopped_because = "it broke"
    assert engine.stopped_because == "it broke"
    engine.replace(second)
    assert engine.stopped_because is None
    text = "".join(delta.text for delta in asyncio.run(answer(engine)))
    assert text == "second"


def test_everything_else_is_the_engine_s():
    inner = scripted()
    engine = metered(inner)

    async def main():
        await engine.pause()
        await engine.resume()
        await engine.abort_all()
        await engine.wake_up()
        await engine.reset_prefix_cache()
        return [
            await engine.sleep(2),
            await engine.update_weights("/w", policy="keep", version=5),
            await engine.profile(None),
            (await engine.stats())["steps"],
        ]

    assert asyncio.run(main()) == [2000, 5, "trace.json.gz", 40]
    assert [call[0] for call in inner.calls] == [
        "pause", "resume", "abort_all", "wake_up", "reset_prefix_cache", "sleep", "update_weights", "profile", "stats",
    ]  # fmt: skip
    engine.close()
    assert inner.is_closed
