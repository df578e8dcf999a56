"""Bodies that are made to break or to block something, at every route that answers: each gets its answer, and so does
/health meanwhile. docs/operations.md has this table."""

import gzip
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from glm5.chat.schema import Schema
from glm5.engine.sampling.params import MAX_CHARS, SamplingParams
from glm5.serve.http import body as bodies
from tests.support.serving import CHAT, SECONDS, scripted, served

COMPLETIONS, MESSAGES, RESPONSES, GENERATE = "/v1/completions", "/v1/messages", "/v1/responses", "/generate"
MAX_BYTES, MAX_VALUES, MAX_PARTS = 1 << 18, 1 << 12, 1 << 10  # of this server: small ones do as well
JSON = {"Content-Type": "application/json"}


def requested(path: str, text: str = "hi", **more) -> dict:
    """A request that is answered."""
    messages = [{"role": "user", "content": text}]
    said = {CHAT: {"messages": messages}, COMPLETIONS: {"prompt": text}, RESPONSES: {"input": text}}
    said |= {MESSAGES: {"messages": messages, "max_tokens": 5}, GENERATE: {"text": text}}
    return said[path] | more


def with_schema(path: str, schema: dict) -> dict:
    """The schema where the route has that of an answer."""
    form = {"type": "json_schema", "name": "x", "schema": schema}
    places = {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": form}},
        COMPLETIONS: {"guided_json": schema},
        MESSAGES: {"output_config": {"format": form}},
        RESPONSES: {"text": {"format": form}},
        GENERATE: {"sampling_params": {"json_schema": json.dumps(schema)}},
    }
    return requested(path) | places[path]


def with_tool(path: str, schema: dict, *, is_forced: bool = True) -> dict:
    """The schema where the route has that of a tool, which must be called or may be."""
    function = {"name": "f", "strict": is_forced}
    tools, forced = {
        CHAT: ({"type": "function", "function": function | {"parameters": schema}}, "required"),
        MESSAGES: (function | {"input_schema": schema}, {"type": "any"}),
        RESPONSES: ({"type": "function", **function, "parameters": schema}, "required"),
    }[path]
    return requested(path, tools=[tools]) | ({"tool_choice": forced} if is_forced else {})


def raw(path: str, field: str) -> str:
    """A good body and another field, as text."""
    return f"{json.dumps(requested(path))[:-1]}, {field}}}"


def repeated(path: str, part: str, times: int) -> str:
    return raw(path, f'"x": [{part * times}1]')


def nested(depth: int) -> str:
    return f'"x": {"[" * depth}{"]" * depth}'


def doubling(key: str, depth: int, *, is_shared: bool) -> dict:
    """A property of so many levels, each of which has the next one twice."""
    schemas = {f"d{depth}": {"type": "object", "properties": {"a": {"type": "string"}}}}
    for i in range(depth):
        below = {"$ref": f"#/$defs/d{i + 1}"}
        schemas[f"d{i}"] = {key: [below, below if is_shared else {key: [below, {"const": str(i)}]}]}
    return {"type": "object", "properties": {"p": {"$ref": "#/$defs/d0"}}, "$defs": schemas}


def root(schema: dict) -> dict:
    return {"$defs": schema["$defs"], "$ref": "#/$defs/d0"}


def whole_number(path: str, number: int) -> dict:
    return requested(path) | ({"sampling_params": {"top_k": number}} if path == GENERATE else {"top_k": number})


def escaped(path: str, text: str) -> str:
    return json.dumps(requested(path, "@")).replace("@", text)


# name: (body of a path, status, part of the message); bodies that are no text are sent as JSON
EVERYWHERE = {
    "nested 100,000 deep": (lambda p: raw(p, nested(100_000)), 400, f"more than {MAX_PARTS} lists, objects and"),
    "nested 1,000 deep": (lambda p: raw(p, nested(1000)), 400, "the body is "),
    "nested 129 deep": (lambda p: raw(p, nested(128)), 400, "the body is nested more than 128 deep"),
    "nested 128 deep": (lambda p: raw(p, nested(127)), 200, ""),
    "too many lists": (lambda p: repeated(p, "[],", MAX_PARTS), 400, f"more than {MAX_PARTS} lists, objects and"),
    "too many values": (lambda p: repeated(p, "1,", MAX_VALUES), 400, f"more than {MAX_VALUES} values in lists"),
    "too many fields": (
        lambda p: raw(p, ",".join(f'"k{i}":1' for i in range(MAX_PARTS))), 400, f"more than {MAX_PARTS} lists, "),
    "commas and brackets in a text": (lambda p: raw(p, '"x": "' + r"[{:,\\" * MAX_VALUES + '"'), 200, ""),
    "above the limit of bytes": (lambda p: requested(p, "a" * MAX_BYTES), 413, f"larger than {MAX_BYTES} bytes"),
    "a long text": (lambda p: requested(p, "a" * (MAX_BYTES - 4096)), 400, "the context holds 8192 tokens"),
    "1e400": (lambda p: raw(p, '"temperature": 1e400'), 400, "1e400 is larger than any number that is read here"),
    "1e400 that nobody reads": (lambda p: raw(p, '"x": [-1e400]'), 400, "-1e400 is larger than any number"),
    "an integer of 400 digits": (lambda p: whole_number(p, 10**400), 400, "top_k is 1000"),
    "an integer of 5,000 digits": (lambda p: raw(p, f'"top_k": 1{"0" * 5000}'), 400, "the body has an integer of "),
    "NaN": (lambda p: raw(p, '"temperature": NaN'), 400, "NaN is not JSON"),
    "Infinity": (lambda p: raw(p, '"x": -Infinity'), 400, "-Infinity is not JSON"),
    "half a surrogate pair": (lambda p: escaped(p, "\\ud800"), 400, "unpaired surrogate"),
    "half a surrogate pair in bytes": (
        lambda p: escaped(p, "@").encode().replace(b"@", b"\xed\xa0\x80"), 400, "the body is not JSON: 'utf-8'"),
    "half a surrogate pair in UTF-16": (
        lambda p: escaped(p, "\\ud800").encode("utf-16"), 400, "the body is not JSON: 'utf-8'"),
    "a NUL": (lambda p: escaped(p, "\\u0000"), 200, ""),
    "bare NULs": (lambda p: b"\0" * 100, 400, "the body is not JSON"),
    "a byte order mark": (lambda p: b"\xef\xbb\xbf" + json.dumps(requested(p)).encode(), 200, ""),
    "Latin-1": (lambda p: escaped(p, "\u00fc").encode("latin-1"), 400, "the body is not JSON: 'utf-8'"),
    "a key twice": (lambda p: raw(p, '"stream": true, "stream": false'), 200, ""),
    "gzip": (lambda p: (gzip.compress(json.dumps(requested(p)).encode()), {"Content-Encoding": "gzip"}), 415,
             "content-encoding is 'gzip'; allowed: none"),
    "another type": (lambda p: (json.dumps(requested(p)), {"Content-Type": "text/plain"}), 415,
                     "allowed: application/json"),
    "a list": (lambda p: "[1]", 400, "the body is a JSON list; expected an object"),
    "wrong types": (lambda p: requested(p) | dict.fromkeys(requested(p), 5), 400, "is 5; allowed: "),
    "a schema that is too long": (
        lambda p: with_schema(p, {"enum": ["x" * 100] * 2000}), 400, f"more than {MAX_CHARS} characters"),
}  # fmt: skip
WITH_TOOLS = {
    "a tool of 2**20 ways that are one": (
        lambda p: with_tool(p, root(doubling("allOf", 20, is_shared=True)), is_forced=False), 200, ""),
    "a union of 2**15 values that are one": (lambda p: with_tool(p, doubling("anyOf", 15, is_shared=True)), 200, ""),
    "a union of 2**13 values": (
        lambda p: with_tool(p, doubling("anyOf", 13, is_shared=False)), 400,
        "the parameters of 'f' need too many characters of a grammar"),
}  # fmt: skip
NUMBERS = {
    CHAT: {"logit_bias": {"5": 10**400}},
    COMPLETIONS: {"logit_bias": {"5": 10**400}},
    GENERATE: {"sampling_params": {"logit_bias": {"5": 10**400}}},
}


@pytest.fixture(scope="module")
def http():
    engine = scripted()
    engine.max_model_len = 8192
    with served(engine, max_body_bytes=MAX_BYTES) as http:
        yield http


@pytest.fixture
def small_bounds(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_VALUES", MAX_VALUES)
    monkeypatch.setattr(bodies, "MAX_PARTS", MAX_PARTS)


def found(http, path: str, body, message: str) -> tuple[int, str]:
    """Status, and the message: the expected part of it, if that is in it. /health answers while it is on its way."""
    content, headers = body if isinstance(body, tuple) else (body, {})
    content = json.dumps(content) if isinstance(content, dict) else content
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=http.base_url, timeout=SECONDS) as other:
        answer = pool.submit(http.post, path, content=content, headers=JSON | headers)
        while True:
            assert other.get("/health").status_code == 200
            if answer.done():
                break
    answer = answer.result()
    reported = json.loads(answer.text, parse_constant=pytest.fail)
    text = reported["error"]["message"] if answer.status_code != 200 else ""
    assert len(text) < 1000
    return answer.status_code, message if message in text else text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE])
def test_every_body_has_its_answer(http, small_bounds, path):
    table = EVERYWHERE | (WITH_TOOLS if path in (CHAT, MESSAGES, RESPONSES) else {})
    if path in NUMBERS:
        table["a bias of 400 digits"] = (lambda path: requested(path) | NUMBERS[path], 400, "logit_bias is {'5': 1")
    expected = {name: (status, message) for name, (_, status, message) in table.items()}
    assert {name: found(http, path, body(path), message) for name, (body, _, message) in table.items()} == expected


@pytest.mark.parametrize("name", ["metadata", "user"])
def test_a_response_does_not_repeat_what_is_too_long(http, name):
    value = "x" * (1 << 14)
    answer = http.post(RESPONSES, json=requested(RESPONSES) | {name: {"a": value} if name == "metadata" else value})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{name} has more than 16384 characters")


@pytest.mark.parametrize("stream", [False, True])
def test_the_functions_of_a_request_are_read_once_and_not_by_the_event_loop(http, monkeypatch, stream):
    """However many answers there are."""
    readers = []
    alternatives = Schema.alternatives

    def noted(schema, node, depth=0):
        if depth == 0 and node is not None:
            readers.append(threading.current_thread().name)
        return alternatives(schema, node, depth)

    monkeypatch.setattr(Schema, "alternatives", noted)
    body = with_tool(CHAT, {"properties": {"a": {"type": "string"}}}, is_forced=False) | {"n": 3, "stream": stream}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200
    assert len(readers) == 1
    assert readers[0].startswith("asyncio_")  # a thread of asyncio.to_thread


def test_many_prompts_have_their_fields_looked_through_once(http, monkeypatch):
    """Or a small body would be as much work as one of prompts times fields."""
    checked = []
    check = SamplingParams.__post_init__
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda params: (checked.append(params), check(params))[1])
    answer = http.post(COMPLETIONS, json={"prompt": ["x"] * 100, "allowed_token_ids": [1] * 1000, "max_tokens": 1})
    assert answer.status_code == 200
    assert len(checked) < 5
