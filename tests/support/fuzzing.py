"""Requests made up from the server's own OpenAPI documents, by schemathesis."""

from contextlib import contextmanager

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.serve.http.documents import document
from glm5.serve.http.server import bind, serving
from tests.support.models import random_model
from tests.support.serving import bearer, key, make_app, scripted
from tests.support.tokenizers import tiny_tokenizer

SECONDS = 60  # without an answer for so long, a request hangs
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance)


def api(*, is_admin: bool, coverage: bool = True):
    """The document's operations. `coverage`: every field at its bounds and of other types, beside random requests."""
    config = schemathesis.Config.from_dict({"cache": {"enabled": False}, "phases": {"coverage": {"enabled": coverage}}})
    return schemathesis.openapi.from_dict(document(make_app(scripted()), is_admin=is_admin), config=config)


def amount(max_examples: int) -> settings:
    """So many random requests an operation, the same in every run."""
    return settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def tiny_server(**options):
    """URL of a server with keys around the tiny random model, with a context of 512 tokens."""
    cfg = preset("tiny").replace(eos_token_id=tiny_tokenizer().eos_ids)
    llm = LLM(random_model(11, cfg), tiny_tokenizer(), max_num_seqs=4, max_model_len=512)
    with AsyncEngine(llm) as engine:
        app = make_app(engine, key("user"), key("boss", role="admin"), **options)
        with serving(app, engine, bind("127.0.0.1", 0)) as url:
            yield url


def send(case, url: str, who: str):
    """Whatever it is, the answer is one that the document knows, of a type that it names, and below 500."""
    case.body = _mended(case)
    answer = case.call(base_url=url, headers=bearer(who), timeout=SECONDS)
    case.validate_response(answer, checks=CHECKS)
    return answer


def _mended(case):
    """What would nearly always be refused for the same reason is sent seldom, or nothing else would be looked at:
    fields that exclude each other, and integers written as 1.0."""
    body, pick = _whole(case.body), len(str(case.body)) % 8
    if not isinstance(body, dict) or not pick:
        return case.body
    if not body.get("stream"):
        body.pop("stream_options", None)
    for one, other in (("prompt", "messages"), ("text", "input_ids")):
        if one in body and other in body and case.path in ("/tokenize", "/generate"):
            del body[(one, other)[pick % 2]]
    return body


def _whole(value):
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
