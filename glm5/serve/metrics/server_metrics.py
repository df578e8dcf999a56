"""The server's metrics, under vLLM's names where vLLM has one, so that its dashboards work unchanged.

The times of a request start when it is sent to the engine, and are measured when a step's tokens arrive, however slowly
the client reads. A step may return several tokens; the inter-token latency is, as in vLLM, the time between steps. Each
scrape of /metrics fetches the engine's own counters (cache, drafts, running and waiting requests).
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from glm5.engine.frontend.outputs import Delta
from glm5.engine.transport.wire import EngineInfo
from glm5.serve.metrics.prometheus import Page

STATS_SECONDS = 1.0  # the engine answers after its current step, which may take longer
RATE_SECONDS = 10.0

_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_INTER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_REASONS = ("stop", "length", "abort", "error")
_REFUSALS = (
    "concurrency_limit_exceeded", "draining", "forbidden", "invalid_api_key", "invalid_session", "main_process_silent",
    "no_admin_key", "queue_full", "rate_limit_exceeded", "unknown_host",
)  # fmt: skip
_STATUSES = ("2xx", "4xx", "5xx", "left")
_TOKENS = [factor * 10**power for power in range(7) for factor in (1, 2, 5)]


class Engine(Protocol):
    """What is read of an engine."""

    @property
    def info(self) -> EngineInfo: ...
    async def stats(self) -> dict[str, Any]: ...


class Rate:
    """How fast a count grows, over the last seconds in which it was observed."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def observe(self, count: float, now: float) -> None:
        """Record a count. A lower one than before is that of a new engine."""
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, count))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_SECONDS:
            self._seen.popleft()

    @property
    def value(self) -> float:
        """Per second; 0 before the second observation."""
        if len(self._seen) < 2:
            return 0.0
        (start, before), (end, after) = self._seen[0], self._seen[-1]
        return (after - before) / (end - start) if end > start else 0.0


class ServerMetrics:
    """All metrics of a server, and their page for Prometheus."""

    def __init__(self, model_name: str):
        page = self.page = Page({"model_name": model_name, "engine": "0"})
        counter, gauge, histogram = page.counter, page.gauge, page.histogram
        self.running = gauge("vllm:num_requests_running", "Requests in the engine's batches.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests that wait for a place in a batch.")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the cache's pages that requests hold, 0 to 1.")
        self.cache_config = gauge(
            "vllm:cache_config_info",
            "1; the cache's sizes are the labels.",
            *("block_size", "num_gpu_blocks", "cache_dtype"),
        )
        self.hit_rate = gauge("vllm:gpu_prefix_cache_hit_rate", "Share of looked-up prompt tokens that were found.")
        self.queries = counter("vllm:prefix_cache_queries_total", "Prompt tokens that were looked up in the cache.")
        self.hits = counter("vllm:prefix_cache_hits_total", "Prompt tokens that were found there, in any tier.")
        self.tier_hits = counter("glm5:prefix_cache_hit_tokens_total", "Prompt tokens found in a tier.", "tier")
        self.damaged = counter(
            "glm5:kv_tier_damaged_pages_total", "Pages of a tier that were not what was put there: misses.", "tier"
        )
        self.preemptions = counter("vllm:num_preemptions_total", "Times that a request lost its pages.")
        self.prompt_tokens = counter("vllm:prompt_tokens_total", "Tokens of prompts.")
        self.generated = counter("vllm:generation_tokens_total", "Tokens of answers.")
        self.finished = counter("vllm:request_success_total", "Answers that ended, by why.", "finished_reason")
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From request to first token.", _FIRST_TOKEN)
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "From one step of an answer to the next.", _INTER_TOKEN
        )
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of an answer, after its first token.", _INTER_TOKEN
        )
        self.latency = histogram("vllm:e2e_request_latency_seconds", "From request to the end of it.", _REQUEST)
        self.queued = histogram("vllm:request_queue_time_seconds", "Until a request's first step.", _REQUEST)
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds", "From a request's first step to its first token.", _REQUEST
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds", "From first token to the end of a request.", _REQUEST
        )
        self.prompt_lengths = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.answer_lengths = histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        drafts = "vllm:spec_decode_num_"
        self.drafts = counter(f"{drafts}drafts_total", "Steps of an answer with drafted tokens.")
        self.drafted = counter(f"{drafts}draft_tokens_total", "Tokens that were drafted.")
        self.accepted = counter(f"{drafts}accepted_tokens_total", "Accepted draft tokens.")
        self.accepted_at = counter(
            f"{drafts}accepted_tokens_per_pos_total", "Accepted draft tokens by position.", "position"
        )
        self.steps = counter("glm5:engine_steps_total", "Steps that computed something.")
        self.rows = counter("glm5:engine_tokens_total", "Tokens that were computed in steps, of prompts and answers.")
        self.kernels = counter(
            "glm5:kernels_built_late_total", "GPU kernels that were compiled, or loaded from disk, after the start."
        )
        self.simulated = gauge(
            "glm5:simulated_acceptance", "Tokens a step where drafts stand at random, to measure speed; else 0."
        )
        self.weights = gauge("glm5:weight_version", "Version of the weights in use.")
        self.up = gauge("glm5:engine_up", "1 while requests are answered.")
        self.restarts = counter("glm5:engine_restarts_total", "Times that a dead engine was replaced.")
        self.in_flight = gauge("glm5:http_requests_in_flight", "HTTP requests that wait for the end of their answer.")
        self.refused = counter("glm5:requests_refused_total", "Requests turned away before the engine, by why.", "code")
        self.tenant_tokens = counter("glm5:key_tokens_total", "Tokens by the API key that paid.", "key", "kind")
        self.http = counter("http_requests_total", "HTTP requests answered.", "method", "handler", "status")
        for tier in ("device", "host", "disk"):
            self.tier_hits.set_total(0, tier)
        for tier in ("host", "disk"):
            self.damaged.set_total(0, tier)
        self.accepted_at.set_total(0, "0")
        for reason in _REASONS:
            self.finished.add(0, reason)
        for code in _REFUSALS:
            self.refused.add(0, code)
        self.engine_stats: Mapping[str, Any] | None = None
        self.throughput = Rate()

    def begin(self, handlers: Iterable[tuple[str, str]], keys: Iterable[str]) -> None:
        """Show counters of what has not occurred as 0: of methods and paths of routes, and of names of keys."""
        for (method, handler), status in product(handlers, _STATUSES):
            self.http.add(0, method, handler, status)
        for key, kind in product(keys, ("prompt", "generation")):
            self.tenant_tokens.add(0, key, kind)

    async def read_engine(self, engine: Engine) -> dict[str, Any] | None:
        """Set the metrics that the engine counts itself, and return its counters. None if it does not answer in time,
        since it answers after its current step. Raises GlmError if it has ended."""
        info = engine.info
        self.cache_config.set_only(1, str(info.page_size), str(info.num_pages), info.cache_dtype)
        try:
            async with asyncio.timeout(STATS_SECONDS):
                stats = await engine.stats()
        except TimeoutError:
            return None
        self.set_engine_stats(stats)
        return stats

    def set_engine_stats(self, stats: Mapping[str, Any]) -> None:
        """Set the metrics of `glm5.engine.core.stats`."""
        self.engine_stats = stats
        self.throughput.observe(stats["sampled_tokens"], time.monotonic())
        self.running.set(stats["prompting"] + stats["decoding"])
        self.waiting.set(stats["waiting"])
        pages, cache, drafts = stats["pages"], stats["prefix_cache"], stats["speculation"]
        self.kv_usage.set(pages["in_use"] / pages["all"] if pages["all"] else 0.0)
        self.queries.set_total(cache["query_tokens"])
        self.hits.set_total(sum(cache["hit_tokens"].values()))
        self.hit_rate.set(self.hits.value() / cache["query_tokens"] if cache["query_tokens"] else 0.0)
        for tier, tokens in cache["hit_tokens"].items():
            self.tier_hits.set_total(tokens, tier)
        tiers = stats["tiers"] or {}
        for tier, name in (("host", "damaged"), ("disk", "disk_damaged")):
            self.damaged.set_total(tiers.get(name, 0), tier)
        self.preemptions.set_total(stats["preemptions"])
        self.drafts.set_total(drafts["drafted"][0] if drafts["drafted"] else 0)
        self.drafted.set_total(sum(drafts["drafted"]))
        self.accepted.set_total(sum(drafts["accepted"]))
        for position, tokens in enumerate(drafts["accepted"]):
            self.accepted_at.set_total(tokens, str(position))
        self.steps.set_total(stats["steps"])
        self.rows.set_total(stats["rows"])
        self.kernels.set_total(stats.get("kernels_built_late", 0))
        self.simulated.set(drafts.get("simulated_acceptance") or 0.0)
        self.weights.set(stats["weight_version"])


@dataclass(slots=True)
class _AnswerTimes:
    """One answer so far. `began`, `last`: when its first and last tokens arrived; before, `last` is the start."""

    last: float
    began: float | None = None
    num_tokens: int = 0
    has_ended: bool = False


class RequestMetrics:
    """Measures one request to the engine. `ended` must be called, also after an error."""

    __slots__ = ("_answers", "_first", "_start", "first_token_s", "key", "metrics", "num_prompt", "queued_s")

    def __init__(self, metrics: ServerMetrics, key: str, num_prompt: int, num_answers: int):
        self.metrics, self.key, self.num_prompt = metrics, key, num_prompt
        self.queued_s: float | None = None
        self.first_token_s: float | None = None
        self._start = time.monotonic()
        self._first: float | None = None
        self._answers = [_AnswerTimes(self._start) for _ in range(num_answers)]
        metrics.prompt_tokens.add(num_prompt)
        metrics.prompt_lengths.observe(num_prompt)
        metrics.tenant_tokens.add(num_prompt, key, "prompt")

    @property
    def num_generated(self) -> int:
        """Tokens of all answers so far."""
        return sum(answer.num_tokens for answer in self._answers)

    def add(self, delta: Delta) -> None:
        """Record what steps added to an answer."""
        metrics, answer, count = self.metrics, self._answers[delta.index], len(delta.token_ids)
        if count:
            for now in (delta.arrived,) if delta.arrivals is None else delta.arrivals:
                if answer.began is not None:
                    metrics.inter_token.observe(now - answer.last)
                else:
                    answer.began = now
                    if self._first is None:
                        self._first = now
                        self._note_first(delta)
                answer.last = now
            answer.num_tokens += count
            metrics.generated.add(count)
            metrics.tenant_tokens.add(count, self.key, "generation")
        if delta.finish_reason is not None:
            self._end_answer(answer, delta.finish_reason)

    def ended(self, reason: str) -> None:
        """Record the end of the request; `reason` is that of its unfinished answers."""
        for answer in self._answers:
            self._end_answer(answer, reason)
        now = max(answer.last for answer in self._answers) if self._first is not None else time.monotonic()
        self.metrics.latency.observe(now - self._start)
        if self._first is not None:
            self.metrics.decode.observe(now - self._first)

    def _note_first(self, delta: Delta) -> None:
        assert self._first is not None
        waited = self.first_token_s = self._first - self._start
        self.queued_s = delta.queued_s
        self.metrics.first_token.observe(waited)
        if delta.queued_s is not None:
            self.metrics.queued.observe(delta.queued_s)
            self.metrics.prefill.observe(max(0.0, waited - delta.queued_s))

    def _end_answer(self, answer: _AnswerTimes, reason: str) -> None:
        if answer.has_ended:
            return
        answer.has_ended = True
        metrics, num_tokens = self.metrics, answer.num_tokens
        metrics.finished.add(1, reason)
        metrics.answer_lengths.observe(num_tokens)
        if num_tokens > 1 and answer.began is not None:
            metrics.per_token.observe((answer.last - answer.began) / (num_tokens - 1))
