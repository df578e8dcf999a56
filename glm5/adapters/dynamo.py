"""A worker of NVIDIA Dynamo: `python -m glm5.adapters.dynamo MODEL`, written for Dynamo 1.4 to 1.6.

Dynamo's front end tokenizes, routes and parses answers; this worker gets token ids and streams token ids back. Its
engine publishes KV events on a local address, to which Dynamo's worker subscribes and passes them to the KV router.

`sdk` below is Dynamo's package `dynamo.common.backend`, whose abstract class `LLMEngine` the worker implements.
"""

import argparse
import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from glm5.common.errors import ConfigError, MissingExtra, RequestError
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.defaults import NO_DEFAULTS, GenerationDefaults
from glm5.engine.frontend.outputs import Delta
from glm5.engine.sampling.params import SamplingParams, StructuredOutputsParams

PACKAGE = "dynamo.common.backend"
SNAPSHOT_SECONDS = 1.0
_EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAMPLING = (*_PENALTIES, "temperature", "top_p", "top_k", "min_p", "seed", "n")
_STOPS = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
_REASONS = {"abort": "cancelled"}

Chunk = dict[str, Any]


class DynamoEngine:
    """What Dynamo's worker calls, in the order of its life: `from_args`, `start`, `generate` and `abort` of many
    requests, `cleanup`. `engine`: keywords of `AsyncEngine`."""

    sdk: ClassVar[Any] = None

    def __init__(self, model: str, name: str, engine: Mapping[str, Any]):
        self.model, self.name, self.keywords = model, name, dict(engine)
        self.engine: AsyncEngine | None = None
        self._publisher: Any = None
        self._snapshots: asyncio.Task[None] | None = None
        self._num_running = 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["DynamoEngine", Any]:
        """The engine, not started, and Dynamo's `WorkerConfig`. Raises ConfigError."""
        args = _parser().parse_args(argv)
        try:
            keywords = json.loads(args.engine)
        except ValueError:
            raise ConfigError(f"--engine: got {args.engine!r:.60}; allowed: a JSON object") from None
        name = args.served_model_name or args.model
        flags = ("namespace", "component", "endpoint", "discovery_backend", "request_plane", "event_plane")
        config = cls.sdk.WorkerConfig(
            model_name=args.model,
            served_model_name=name,
            tool_call_parser=args.dyn_tool_call_parser,
            reasoning_parser=args.dyn_reasoning_parser,
            **{flag: getattr(args, flag) for flag in flags},
        )
        return cls(args.model, name, keywords), config

    async def start(self, worker_id: int) -> Any:
        """Load the model; Dynamo's `EngineConfig`."""
        keywords = {"kv_events_config": _EVENTS} | self.keywords
        engine = self.engine = await asyncio.to_thread(lambda: AsyncEngine(self.model, **keywords))
        engine.start()
        self._snapshots = asyncio.create_task(self._publish_snapshots(engine))
        info = engine.info
        return self.sdk.EngineConfig(
            model=self.model,
            served_model_name=self.name,
            llm=self.sdk.LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=info.page_size,
                total_kv_blocks=info.num_pages,
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=info.max_num_batched_tokens,
                data_parallel_size=1,
            ),
        )

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[Chunk]:
        """Stream the tokens of a request's answers."""
        assert self.engine is not None
        prompt_ids, params = request["token_ids"], params_of(request, self.engine.defaults)
        num_generated, num_cached = 0, None
        self._num_running += 1
        try:
            async with self.engine.generate(prompt_ids, params, request_id=context.id()) as deltas:
                async for delta in deltas:
                    num_generated += len(delta.token_ids)
                    if num_cached is None:  # the first answer's; others share the prompt that it computed
                        num_cached = delta.num_cached_tokens
                    yield chunk_of(delta, len(prompt_ids), num_generated, num_cached or 0)
        finally:
            self._num_running -= 1

    async def abort(self, context: Any) -> None:
        """End a request that its client has left."""
        if self.engine is not None:
            self.engine.abort(context.id())

    async def is_quiescent(self) -> bool:
        return self._num_running == 0

    async def cleanup(self) -> None:
        """End the engine; also after a failed start, and twice."""
        if self._snapshots is not None:
            self._snapshots.cancel()
            with suppress(asyncio.CancelledError):
                await self._snapshots
        engine, self.engine, self._snapshots = self.engine, None, None
        if engine is not None:
            await asyncio.to_thread(engine.close)

    async def kv_event_sources(self) -> Sequence[Any]:
        """Where Dynamo's worker subscribes to this engine's events."""
        source = None if self.engine is None else self.engine.info.kv_events
        publisher = importlib.import_module(f"{self.sdk.__name__}.publisher")
        return [] if source is None else [publisher.ZmqSource(source.endpoint, topic=source.topic, dp_rank=0)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Keep Dynamo's publisher of loads. Called after the start, from a thread without an event loop."""
        self._publisher = publisher

    async def health_check_payload(self) -> dict[str, Any]:
        """A request of one token."""
        stops, options = {"max_tokens": 1, "ignore_eos": True}, {"temperature": 0.0}
        return {"token_ids": [0], "stop_conditions": stops, "sampling_options": options}

    async def _publish_snapshots(self, engine: AsyncEngine) -> None:
        snapshot = importlib.import_module(f"{self.sdk.__name__}.publisher").ComponentSnapshot
        while True:
            await asyncio.sleep(SNAPSHOT_SECONDS)
            if self._publisher is None:
                continue
            stats = await engine.stats()
            pages, cache = stats["pages"], stats["prefix_cache"]
            hits, queries = sum(cache["hit_tokens"].values()), cache["query_tokens"]
            made = snapshot(
                kv_used_blocks=pages["in_use"],
                kv_total_blocks=pages["all"],
                gpu_cache_usage=pages["in_use"] / pages["all"],
                dp_rank=0,
                kv_cache_hit_rate=hits / queries if queries else None,
            )
            self._publisher.publish(0, made)


def params_of(request: Mapping[str, Any], defaults: GenerationDefaults = NO_DEFAULTS) -> SamplingParams:
    """The sampling parameters of Dynamo's request. `defaults`: the checkpoint's. Raises RequestError for what the
    engine cannot do."""
    options, stops = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    output, given = request.get("output_options") or {}, dict[str, Any](max_tokens=None)
    given |= {name: options[name] for name in _SAMPLING if options.get(name) is not None}
    given |= {name: stops[name] for name in _STOPS if stops.get(name) is not None}
    # Tokens that end the answer and are not shown: the front end removes them.
    if hidden := stops.get("stop_token_ids_hidden"):
        given["stop_token_ids"] = [*given.get("stop_token_ids", ()), *hidden]
    if output.get("logprobs") is not None:
        given["logprobs"] = int(output["logprobs"])
    if (guided := options.get("guided_decoding")) is not None:
        wanted = {name: guided[name] for name in ("json", "regex", "choice", "grammar") if guided.get(name) is not None}
        if not wanted:
            raise RequestError("guided_decoding: allowed: json, regex, choice, grammar", "guided_decoding")
        given["structured_outputs"] = StructuredOutputsParams(**wanted)
    return defaults.params(**given)


def chunk_of(delta: Delta, num_prompt: int, num_generated: int, num_cached: int) -> Chunk:
    """Dynamo's chunk of one step; the last one of each answer has the counts of the request so far."""
    chunk: Chunk = {"token_ids": list(delta.token_ids), "index": delta.index}
    if delta.logprobs:
        rows = [list(row.items()) for row in delta.logprobs]
        chunk["log_probs"] = [row[0][1].logprob for row in rows]
        chunk["top_logprobs"] = [
            [{"rank": entry.rank, "token_id": token_id, "logprob": entry.logprob} for token_id, entry in row]
            for row in rows
        ]
    if delta.finish_reason is not None:
        chunk["finish_reason"] = _REASONS.get(delta.finish_reason, delta.finish_reason)
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_generated}
        counts |= {"total_tokens": num_prompt + num_generated}
        chunk["completion_usage"] = counts | {"prompt_tokens_details": {"cached_tokens": num_cached}}
    return chunk


def engine_class(sdk: Any) -> type[DynamoEngine]:
    """The worker as a subclass of Dynamo's abstract class, which has the methods that are not written here."""
    return type("Glm5Engine", (DynamoEngine, sdk.LLMEngine), {"sdk": sdk})


def main() -> None:
    """Run a worker with the command line's settings until it is stopped."""
    try:
        sdk, run = importlib.import_module(PACKAGE), importlib.import_module(f"{PACKAGE}.run")
    except ImportError as error:
        raise MissingExtra("this needs the package 'dynamo': run  pip install ai-dynamo", name=PACKAGE) from error
    run.run(engine_class(sdk), sys.argv[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m glm5.adapters.dynamo", description="A worker of Dynamo.")
    parser.add_argument("model", help="checkpoint folder or hub id")
    parser.add_argument(
        "--engine", default="{}", help='keywords of AsyncEngine as JSON, such as {"max_model_len": 8192}'
    )
    parser.add_argument("--served-model-name", help="name of the model in the API; default: MODEL")
    defaults = {"namespace": "dynamo", "component": "backend", "endpoint": "generate", "discovery-backend": "etcd"}
    for name, default in (defaults | {"request-plane": "tcp", "event-plane": None}).items():
        parser.add_argument(f"--{name}", default=default, help=f"Dynamo's; default: {default}")
    parser.add_argument("--dyn-tool-call-parser", default="glm47", help="Dynamo's parser of tool calls")
    parser.add_argument("--dyn-reasoning-parser", default="glm45", help="Dynamo's parser of reasoning")
    return parser


if __name__ == "__main__":
    main()
