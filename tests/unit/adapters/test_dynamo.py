"""The worker of Dynamo, on a stand-in of Dynamo's package with the names and fields of Dynamo 1.6."""

import asyncio
import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

from glm5.adapters import dynamo
from glm5.common.errors import ConfigError, MissingExtra, RequestError
from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.sampling.params import StructuredOutputsParams
from tests.support.models import random_model


def in_memory():
    return random_model(11, preset("tiny"))


class LLMEngine(ABC):
    """The abstract methods of Dynamo's class, and one of its own."""

    @classmethod
    @abstractmethod
    async def from_args(cls, argv=None): ...
    @abstractmethod
    async def start(self, worker_id): ...
    @abstractmethod
    async def generate(self, request, context):
        yield {}

    @abstractmethod
    async def cleanup(self): ...
    def supported_controls(self):
        return set()


@dataclass
class LlmRegistration:
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int | None = None


@dataclass
class EngineConfig:
    model: str
    served_model_name: str | None = None
    llm: LlmRegistration | None = None


@dataclass
class WorkerConfig:
    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""
    served_model_name: str | None = None
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True)
class ZmqSource:
    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass
class ComponentSnapshot:
    kv_used_blocks: int
    kv_total_blocks: int
    gpu_cache_usage: float
    dp_rank: int
    kv_cache_hit_rate: float | None = None


@dataclass
class Context:
    name: str

    def id(self) -> str:
        return self.name


@dataclass
class Publisher:
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    snapshots: list = field(default_factory=list)

    def publish(self, rank, snapshot) -> None:
        self.snapshots.append((rank, snapshot))
        self.arrived.set()


@pytest.fixture
def sdk(monkeypatch):
    """The stand-in, under the name of Dynamo's package."""
    package = ModuleType("standin")
    for kind in (LLMEngine, LlmRegistration, EngineConfig, WorkerConfig):
        setattr(package, kind.__name__, kind)
    publisher = ModuleType("standin.publisher")
    publisher.ZmqSource, publisher.ComponentSnapshot = ZmqSource, ComponentSnapshot
    monkeypatch.setitem(sys.modules, "standin", package)
    monkeypatch.setitem(sys.modules, "standin.publisher", publisher)
    return importlib.import_module("standin")


async def chunks(engine, request, name="r1") -> list[dict]:
    return [chunk async for chunk in engine.generate(request, Context(name))]


def test_the_life_of_a_worker(sdk, monkeypatch):
    monkeypatch.setattr(dynamo, "AsyncEngine", lambda _, **keywords: AsyncEngine(in_memory(), **keywords))
    folder = "/models/tiny"
    argv = [folder, "--engine", '{"max_num_seqs": 4}', "--served-model-name", "tiny"]

    async def live():
        engine, config = await dynamo.engine_class(sdk).from_args([*argv, "--discovery-backend", "file"])
        assert (config.model_name, config.served_model_name) == (folder, "tiny")
        assert (config.discovery_backend, config.tool_call_parser) == ("file", "glm47")
        assert isinstance(engine, LLMEngine)
        assert engine.supported_controls() == set()
        await engine.cleanup()  # before any start
        publisher = Publisher()
        made = await engine.start(7)
        assert made.llm.kv_cache_block_size == 64
        assert (made.llm.max_num_seqs, made.llm.context_length) == (4, 1024)
        engine.attach_snapshot_publisher(publisher)
        assert engine.component_metrics_dp_ranks() == [0]
        (source,) = await engine.kv_event_sources()
        assert source.endpoint.startswith("tcp://127.0.0.1:")
        assert await engine.is_quiescent()

        stops = {"max_tokens": 9, "ignore_eos": True}
        request = {"token_ids": list(range(100)), "sampling_options": {"seed": 3, "n": 2}, "stop_conditions": stops}
        request["output_options"] = {"logprobs": 1}
        found = await chunks(engine, request)
        assert {chunk["index"] for chunk in found} == {0, 1}
        ends = [chunk for chunk in found if "finish_reason" in chunk]
        assert [chunk["finish_reason"] for chunk in ends] == ["length", "length"]
        usage = {"prompt_tokens": 100, "completion_tokens": 18, "total_tokens": 118}
        assert ends[-1]["completion_usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
        for chunk in found:
            assert len(chunk["log_probs"]) == len(chunk["top_logprobs"]) == len(chunk["token_ids"])
        assert (await chunks(engine, await engine.health_check_payload()))[-1]["finish_reason"] == "length"

        endless = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 1000, "ignore_eos": True}}
        reasons = []
        async for chunk in engine.generate(endless, Context("gone")):
            assert not await engine.is_quiescent()
            await engine.abort(Context("gone"))
            reasons.append(chunk.get("finish_reason"))
        assert reasons[-1] == "cancelled"

        await asyncio.wait_for(publisher.arrived.wait(), 60)
        rank, snapshot = publisher.snapshots[0]
        assert (rank, snapshot.dp_rank, snapshot.kv_total_blocks) == (0, 0, made.llm.total_kv_blocks)
        await engine.cleanup()
        await engine.cleanup()
        assert await engine.kv_event_sources() == []

    asyncio.run(live())


def test_what_a_request_asks_for():
    request = {
        "token_ids": [1],
        "sampling_options": {"top_k": 5, "seed": None, "repetition_penalty": 1.5, "guided_decoding": {"regex": "a+"}},
        "stop_conditions": {"stop": ["x"], "stop_token_ids": [3], "stop_token_ids_hidden": [4], "min_tokens": 2},
    }
    params = dynamo.params_of(request)
    assert (params.top_k, params.seed, params.repetition_penalty, params.max_tokens) == (5, None, 1.5, None)
    assert (params.stop, params.stop_token_ids, params.min_tokens) == (("x",), (3, 4), 2)
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")
    with pytest.raises(RequestError, match="guided_decoding"):
        dynamo.params_of({"token_ids": [1], "sampling_options": {"guided_decoding": {"whitespace": "x"}}})


def test_wrong_settings(sdk):
    with pytest.raises(ConfigError, match="--engine: got 'max'; allowed: a JSON object"):
        asyncio.run(dynamo.engine_class(sdk).from_args(["x", "--engine", "max"]))


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(dynamo, "PACKAGE", "no_such_package_of_dynamo")
    with pytest.raises(MissingExtra, match="pip install ai-dynamo"):
        dynamo.main()


def test_the_main_program(sdk, monkeypatch):
    run = SimpleNamespace(run=lambda kind, argv: ran.append((kind, argv)))
    ran = []
    monkeypatch.setattr(dynamo, "PACKAGE", "standin")
    monkeypatch.setitem(sys.modules, "standin.run", run)
    monkeypatch.setattr(sys, "argv", ["worker", "model", "--namespace", "x"])
    dynamo.main()
    ((kind, argv),) = ran
    assert issubclass(kind, LLMEngine)
    assert argv == ["model", "--namespace", "x"]
