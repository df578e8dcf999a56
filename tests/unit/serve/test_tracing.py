"""Traces: one of each HTTP request, with the engine's work in it and nothing of its text; sent where they should be."""

import json
import sys

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from glm5.chat.template import ChatTemplate
from glm5.cli.main import main
from glm5.config.serve import ServeConfig
from glm5.serve.app import create_app
from glm5.serve.http.server import bind, serving
from glm5.serve.metrics.tracing import Tracing
from tests.support.serving import CHAT, SECONDS, scripted

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def test_a_request_is_one_trace_with_the_engine_s_work_in_it():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = scripted("</think>the secret answer")
    body = {"messages": [{"role": "user", "content": "my secret question"}], "temperature": 0.5, "max_tokens": 60}
    template = ChatTemplate.bundled("glm-5.1", engine.tokenizer)
    app = create_app(engine, template, engine.tokenizer, ServeConfig(model="tiny"), tracing=Tracing(provider))
    with serving(app, engine, bind("127.0.0.1", 0)) as url:
        answer = httpx.post(url + CHAT, json=body, headers={"traceparent": PARENT}, timeout=SECONDS)
        assert answer.status_code == 200
    spans = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    by_id = {span.context.span_id: span for span in spans}
    (request,) = [span for span in spans if span.name == "llm_request"]
    ancestors, span = [], request
    while span.parent is not None and span.parent.span_id in by_id:
        span = by_id[span.parent.span_id]
        ancestors.append(span.name)
    assert ancestors[-1] == f"POST {CHAT}"
    said = request.attributes
    assert said["gen_ai.request.id"].startswith("chatcmpl-")
    assert said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.usage.prompt_tokens"] == len(engine.prompt_ids)
    assert said["gen_ai.usage.completion_tokens"] == len(engine.tokenizer.encode(engine.script))
    assert said["gen_ai.latency.time_to_first_token"] > 0
    assert not any("secret" in json.dumps(json.loads(span.to_json())) for span in spans)


def test_traces_are_sent_at_the_latest_at_the_end(collector):
    address, came = collector
    tracing = Tracing.to(address)
    tracing.provider.get_tracer("test").start_span("a name to find").end()
    tracing.close()
    path, content = came.get(timeout=SECONDS)
    assert path == "/v1/traces"
    assert b"a name to find" in content
    assert b"glm5" in content


@pytest.mark.parametrize("processes", ["1", "2"])
def test_without_the_extra_it_is_named(processes, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    flags = ["--api-server-count", processes, "--otlp-traces-endpoint", "http://localhost:4318/v1/traces"]
    assert main(["serve", "no/such/model", *flags]) == 1
    assert capsys.readouterr().err.endswith("run  pip install 'glm5[otel]'\n")
