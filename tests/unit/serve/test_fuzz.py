"""Values of every kind in every field: whatever comes, the answer is 200 or says what is wrong; the server goes on.

Long runs of this are schemathesis' (`make soak`); here is what a unit test has time for.
"""

import json
import random

import pytest

from glm5.serve.anthropic.body import CountBody, MessagesBody
from glm5.serve.chat.body import ChatBody
from glm5.serve.completions.body import CompletionBody
from glm5.serve.responses.body import ResponsesBody
from glm5.serve.sglang.body import AbortBody, GenerateBody
from glm5.serve.vllm.generate_body import GenerateBody as TokensBody
from glm5.serve.vllm.tokens import DetokenizeBody, TokenizeBody
from tests.unit.serve.asking import ASK

ROUTES = {
    "/v1/chat/completions": (ChatBody, {"messages": ASK}),
    "/v1/completions": (CompletionBody, {"prompt": "x"}),
    "/tokenize": (TokenizeBody, {"messages": ASK}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
    "/v1/responses": (ResponsesBody, {"input": "x"}),
    "/v1/messages": (MessagesBody, {"messages": ASK, "max_tokens": 5}),
    "/v1/messages/count_tokens": (CountBody, {"messages": ASK}),
    "/generate": (GenerateBody, {"text": "x"}),
    "/inference/v1/generate": (TokensBody, {"token_ids": [1]}),
    "/abort_request": (AbortBody, {"rid": "x"}),
}
ATOMS = [None, True, False, 0, 1, -1, 7, 2**31, 2**63, 2**70, 0.5, -1e300, 1e-300, "", "x", "auto", "\u00fc\U0001f600",
         "a" * 300, "a" * 5000, "\x00", "</think>", "none", "required", "high", "json_object", "function"]  # fmt: skip
KEYS = ["type", "function", "name", "parameters", "properties", "required", "strict", "json", "json_schema", "schema",
        "role", "content", "text", "tool_calls", "arguments", "enum", "items", "anyOf", "$ref", "pattern", "minLength",
        "include_usage", "enable_thinking", "budget_tokens", "5", "regex", "choice",
        "additionalProperties", "k" * 5000]  # fmt: skip
NUM_REQUESTS = 120


def value(rng: random.Random, depth: int = 0):
    kind = rng.random()
    if kind < 0.5 or depth > 4:
        return rng.choice(ATOMS)
    if kind < 0.7:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randrange(5))}


@pytest.mark.parametrize("path", ROUTES)
def test_any_value_in_any_field(http, engine, rng, path):
    kind, good = ROUTES[path]
    engine.script = "</think>x<|user|>"
    names = [*kind.model_fields, *kind.refused]
    statuses = set()
    for _ in range(NUM_REQUESTS):
        body = dict(good)
        for _ in range(rng.choice((1, 1, 2, 5))):
            body[rng.choice(names)] = value(rng)
        answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"], body
            assert len(error["message"]) < 1000, body
        statuses.add(answer.status_code)
    assert statuses >= {200, 400}


BLOCKS = ["text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"]
ITEMS = [
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "item_reference",
    "input_text",
    "computer_call",
]
INNER = ["text", "content", "id", "name", "input", "tool_use_id", "thinking", "signature", "is_error", "tool_name",
         "role", "call_id", "output", "arguments", "summary", "encrypted_content", "status", "refusal"]  # fmt: skip


def block(rng: random.Random, kinds: list[str], depth: int = 0):
    fields = {name: value(rng, 4) for name in rng.sample(INNER, 6)} | {"text": "x", "id": "i", "name": "n"}
    if depth < 2:
        inner = [block(rng, kinds, depth + 1) for _ in range(rng.randrange(3))]
        fields[rng.choice(["content", "output", "summary"])] = inner
    return {"type": rng.choice(kinds), **fields}


def message(rng: random.Random, kinds: list[str]):
    return {"role": rng.choice(["user", "assistant", "system"]), "content": [block(rng, kinds) for _ in range(2)]}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_any_block_of_a_conversation(http, engine, rng, path):
    engine.script = "</think>x<|user|>"
    statuses = set()
    for number in range(2 * NUM_REQUESTS):
        kinds, most = (BLOCKS, rng.randrange(1, 4)) if path == "/v1/messages" else (ITEMS, rng.randrange(1, 3))
        kinds = rng.sample(kinds, rng.randrange(1, 4)) if number % 2 else kinds[:1]
        if path == "/v1/messages":
            body = {"messages": [*ASK, *(message(rng, kinds) for _ in range(most))], "max_tokens": 5}
        else:
            body = {"input": [*ASK, *(rng.choice((block, message))(rng, kinds) for _ in range(most))]}
        answer = http.post(path, json=body)
        assert answer.status_code in (200, 400), (body, answer.text)
        statuses.add(answer.status_code)
        if answer.status_code == 400:
            assert len(answer.json()["error"]["message"]) < 1000, body
    assert statuses == {200, 400}


def tool(rng: random.Random):
    schema = {"type": "object", "properties": {"a": value(rng), "b": value(rng)}, rng.choice(KEYS): value(rng)}
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": rng.random() < 0.5}}


def test_any_schema_of_a_tool(http, engine, rng):
    engine.script = "</think>x<|user|>"
    for number in range(NUM_REQUESTS):
        body = {"messages": ASK, "tools": [tool(rng)], "tool_choice": "required" if number % 2 else "auto"}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code in (200, 400), (body, answer.text)


HOSTILE = {
    "deep": {"type": "object", "properties": {"a": {}}},
    "catastrophic pattern": {"type": "object", "properties": {"x" * 50: {"type": "string", "pattern": "(x+)+$"}},
                             "patternProperties": {"^(x+)+!$": {}}, "additionalProperties": False},
    "wide": {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "(a|b)*c"} for i in range(500)}},
    "long enum": {"type": "object", "properties": {"a": {"enum": [str(i) for i in range(20_000)]}}},
    "many references": {"type": "object", "properties": {"a": {"$ref": "#/$defs/r0"}},
                        "$defs": {f"r{i}": {"anyOf": [{"$ref": f"#/$defs/r{i + 1}"}] * 8} for i in range(40)}
                        | {"r40": {"type": "integer"}}},
}  # fmt: skip
for _ in range(60):
    HOSTILE["deep"] = {"type": "object", "properties": {"a": HOSTILE["deep"]}, "required": ["a"]}


@pytest.mark.parametrize("name", HOSTILE)
def test_schemas_that_are_made_to_be_slow(http, engine, name):
    """Each is answered or refused in the time of the client's patience; the server answers others after it."""
    engine.script = "</think>x<|user|>"
    function = {"name": "f", "parameters": HOSTILE[name], "strict": True}
    body = {"messages": ASK, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    assert http.post("/v1/chat/completions", json=body).status_code in (200, 400)
    assert http.get("/v1/models").status_code == 200


def test_the_document_of_the_api(http):
    """Every field of every body is in it, with every status that a route may answer with."""
    paths = http.get("/openapi.json").json()["paths"]
    for path, (kind, _) in ROUTES.items():
        route = paths[path]["post"]
        schema = route["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"].keys() == kind.model_fields.keys()
        assert set(schema.get("required", [])) == {
            name for name, field in kind.model_fields.items() if field.is_required()
        }
        assert route["responses"].keys() >= {"200", "400", "404", "413", "415", "429", "503"}
    assert "text/event-stream" in paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert "404" in paths["/v1/models/{name}"]["get"]["responses"]
