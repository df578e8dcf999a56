"""OpenTelemetry traces: FastAPI's span of each HTTP request, and a child span for its request to the engine.

A client's `traceparent` header is honoured. The attributes have vLLM's names, and contain no text of a request.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from glm5.common.extras import require
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.metrics.server_metrics import RequestMetrics


class Tracing:
    """`provider` is opentelemetry's TracerProvider, which FastAPI uses too. `close` sends the remaining spans."""

    def __init__(self, provider: Any):
        self.provider = provider
        self._tracer = provider.get_tracer("glm5")

    @classmethod
    def to(cls, endpoint: str) -> "Tracing":
        """Send traces to an OTLP endpoint over HTTP. Raises MissingExtra without the extra `otel`."""
        exporters = require("opentelemetry.exporter.otlp.proto.http.trace_exporter", "otel")
        export = require("opentelemetry.sdk.trace.export", "otel")
        resource = require("opentelemetry.sdk.resources", "otel").Resource.create({"service.name": "glm5"})
        provider = require("opentelemetry.sdk.trace", "otel").TracerProvider(resource=resource)
        provider.add_span_processor(export.BatchSpanProcessor(exporters.OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def close(self) -> None:
        self.provider.shutdown()

    @contextmanager
    def request(
        self, request_id: str | None, params: SamplingParams, metrics: RequestMetrics, session: str = ""
    ) -> Iterator[None]:
        """The span of one request to the engine; `metrics` has its timings at the end."""
        span = self._tracer.start_span("llm_request")
        try:
            yield
        finally:
            requested = {"id": request_id, "n": params.n, "max_tokens": params.max_tokens}
            requested |= {"temperature": params.temperature, "top_p": params.top_p}
            attributes: dict[str, Any] = {f"gen_ai.request.{name}": value for name, value in requested.items()}
            attributes["session.id"] = session or None
            attributes["gen_ai.usage.prompt_tokens"] = metrics.num_prompt
            attributes["gen_ai.usage.completion_tokens"] = metrics.num_generated
            attributes["gen_ai.latency.time_in_queue"] = metrics.queued_s
            attributes["gen_ai.latency.time_to_first_token"] = metrics.first_token_s
            span.set_attributes({name: value for name, value in attributes.items() if value is not None})
            span.end()
