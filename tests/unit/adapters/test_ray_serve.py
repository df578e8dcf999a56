"""The server class of Ray Serve, on stand-ins of Ray's config and of its classes of answers."""

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from pydantic import BaseModel, ConfigDict

from glm5.adapters import ray_serve
from glm5.adapters.ray_serve import Glm5Server
from glm5.common.errors import EngineDead, MissingExtra
from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from tests.support.models import random_model
from tests.support.tokenizers import tiny_tokenizer


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class ChatCompletionResponse(Open):
    choices: list


class CompletionResponse(Open):
    choices: list


class TokenizeResponse(Open):
    tokens: list[int]


class ErrorInfo(Open):
    message: str
    code: int


class ErrorResponse(Open):
    error: ErrorInfo


class Request(Open):
    """Ray's requests have many fields; those that were not set are not passed on."""

    temperature: float | None = 1.5
    best_of: int | None = None


@pytest.fixture
def models(monkeypatch):
    module = ModuleType(ray_serve.MODELS)
    for kind in (ChatCompletionResponse, CompletionResponse, TokenizeResponse, ErrorInfo, ErrorResponse):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, ray_serve.MODELS, module)


def config(folder="x", **engine):
    loading = SimpleNamespace(model_id="tiny", model_source=str(folder))
    deployment = {"num_replicas": 2}
    return SimpleNamespace(model_loading_config=loading, engine_kwargs=engine, deployment_config=deployment)


async def answers(generator) -> list:
    return [answer async for answer in generator]


def test_the_life_of_a_replica(models, monkeypatch):
    def in_memory(source, **keywords):
        assert source == "/models/tiny"
        cfg = preset("tiny").replace(eos_token_id=tiny_tokenizer().eos_ids)
        return AsyncEngine(random_model(11, cfg), tiny_tokenizer(), **keywords)

    monkeypatch.setattr(ray_serve, "AsyncEngine", in_memory)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0.0}

    async def live():
        server = Glm5Server(llm_config=config("/models/tiny", max_num_seqs=4))
        with pytest.raises(EngineDead, match="not started"):
            await server.check_health()
        await server.start()
        await server.start()
        await server.check_health()
        raw = SimpleNamespace(headers={"X-Session-ID": "s", "Authorization": "Bearer secret"})
        (whole,) = await answers(server.chat(Request(**ask), raw))
        assert isinstance(whole, ChatCompletionResponse)
        message = whole.choices[0]["message"]
        events = await answers(server.chat(Request(**ask, stream=True)))
        assert events[-1] == "data: [DONE]\n\n"
        deltas = [json.loads(e.removeprefix("data: "))["choices"][0]["delta"] for e in events[:-1] if e[0] == "d"]
        text = "".join((delta.get("reasoning_content") or "") + (delta.get("content") or "") for delta in deltas)
        assert text == (message.get("reasoning_content") or "") + (message.get("content") or "")
        (completion,) = await answers(server.completions(Request(model="tiny", prompt="a", max_tokens=3)))
        assert isinstance(completion, CompletionResponse)
        (tokens,) = await answers(server.tokenize(Request(prompt="the answer")))
        assert len(tokens.tokens) > 0
        (error,) = await answers(server.chat(Request(**ask | {"max_tokens": -1})))
        assert isinstance(error, ErrorResponse)
        assert error.error.code == 400
        (error,) = await answers(server.chat(Request(**ask | {"model": "other"})))
        assert error.error.code == 404

        stream = server.chat(Request(**ask | {"max_tokens": 800, "ignore_eos": True}, stream=True))
        await anext(stream)
        await stream.aclose()  # leaving it aborts the request
        while (await server._running().stats())["decoding"]:
            continue

        await server.reset_prefix_cache()
        await server.pause()
        assert await server.is_paused()
        await server.resume()
        await server.sleep(level=1)
        assert await server.is_sleeping()
        await server.wakeup()
        assert not await server.is_sleeping()
        assert await server.__serve_build_asgi_app__() is server._app
        assert (await server.llm_config()).model_loading_config.model_id == "tiny"
        server._running().kill()
        with pytest.raises(EngineDead):
            await server.check_health()

    asyncio.run(live())


def test_the_gpus_of_a_replica():
    options = Glm5Server.get_deployment_options(config(tensor_parallel_size=4))
    assert options == {"num_replicas": 2, "ray_actor_options": {"num_gpus": 4}}
    given = config()
    given.deployment_config["ray_actor_options"] = {"num_gpus": 0}
    assert Glm5Server.get_deployment_options(given)["ray_actor_options"] == {"num_gpus": 0}


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(ray_serve, "MODELS", "no_such_package_of_ray")
    with pytest.raises(MissingExtra, match=r"pip install 'ray\[llm\]'"):
        ray_serve._models()
