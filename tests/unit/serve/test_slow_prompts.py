"""Requests made to be slow, of a megabyte each: every one is answered or refused within a client's patience, and so is
whoever asks meanwhile."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from tests.support.models import random_model
from tests.support.serving import CHAT, SECONDS, served
from tests.support.tokenizers import tiny_tokenizer

COMPLETIONS, MESSAGES, RESPONSES, GENERATE = "/v1/completions", "/v1/messages", "/v1/responses", "/generate"
SIZE = 2**20
USER = {"role": "user", "content": "x"}
ONE = {"max_tokens": 1}


def text(content: str) -> dict:
    return {"messages": [{"role": "user", "content": content}], **ONE}


def calls(num: int) -> list[dict]:
    """A turn of many calls, and their results."""
    made = [{"id": str(n), "function": {"name": "f", "arguments": "{}"}} for n in range(num)]
    results = [{"role": "tool", "tool_call_id": str(n), "content": "x"} for n in range(num)]
    return [USER, {"role": "assistant", "content": "", "tool_calls": made}, *results]


def called_with(arguments: str) -> dict:
    made = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [made]}], **ONE}


def tool(name: str, schema: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


def deep(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def wide(num: int) -> dict:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(num)}}


def doubling(depth: int) -> dict:
    """Small as it is, written out it would be 8 ** depth schemas."""
    steps = {f"r{n}": {"anyOf": [{"$ref": f"#/$defs/r{n + 1}"}] * 8} for n in range(depth)}
    return {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/r0"}},
        "$defs": steps | {f"r{depth}": {"type": "null"}},
    }


PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 30_000}], **ONE}
FORCED = {"messages": [USER], "tool_choice": "required", **ONE}
CASES = {
    "one letter": (CHAT, text("a" * SIZE)),
    "blanks": (CHAT, text(" " * SIZE)),
    "blanks of all kinds": (CHAT, text(" \n\t\u00a0" * (SIZE // 5))),
    "accents": (CHAT, text("\u0301" * (SIZE // 2))),
    "digits": (COMPLETIONS, {"prompt": "1" * SIZE, **ONE}),
    "tags": (CHAT, text("<think>" * (SIZE // 7))),
    "half tags": (CHAT, text("<thin" * (SIZE // 5))),
    "ends of turns": (CHAT, text("<|user|>" * (SIZE // 8))),
    "token ids": (COMPLETIONS, {"prompt": [1] * (SIZE // 3), **ONE}),
    "many messages": (CHAT, {"messages": [USER] * 20_000, **ONE}),
    "many parts": (CHAT, PARTS),
    "many calls": (CHAT, {"messages": calls(8000), **ONE}),
    "arguments that open": (CHAT, called_with("[" * SIZE)),
    "deep arguments": (CHAT, called_with('{"a":' * 900 + "1" + "}" * 900)),
    "many blocks": (MESSAGES, PARTS),
    "many items": (RESPONSES, {"input": [USER] * 20_000}),
    "many texts": (GENERATE, {"text": ["x"] * 1025}),
    "many tools": (CHAT, FORCED | {"tools": [tool(f"f{n}", wide(1)) for n in range(3000)]}),
    "a wide tool": (CHAT, FORCED | {"tools": [tool("f", wide(20_000))]}),
    "a deep tool": (CHAT, FORCED | {"tools": [tool("f", deep(60))]}),
    "a deeper tool": (CHAT, FORCED | {"tools": [tool("f", deep(300))]}),
    "a doubling tool": (CHAT, FORCED | {"tools": [tool("f", doubling(60))]}),
    "a doubling schema": (COMPLETIONS, {"prompt": "x", **ONE, "guided_json": doubling(60)}),
    "a slow pattern": (COMPLETIONS, {"prompt": "x", **ONE, "guided_json": {"type": "string", "pattern": "^(a+)+$"}}),
    "a slow regex": (COMPLETIONS, {"prompt": "x", "max_tokens": 40, "regex": "(a*)*" * 25 + "b"}),
    "a slower regex": (COMPLETIONS, {"prompt": "x", **ONE, "regex": "a*" * 5000}),
    "a grammar of nothing": (COMPLETIONS, {"prompt": "x", **ONE, "ebnf": "root ::= " + "(" * 20_000}),
    "many stops": (COMPLETIONS, {"prompt": "x", "max_tokens": 50, "stop": ["a" * 15_000 + str(n) for n in range(64)]}),
    "long bad words": (COMPLETIONS, {"prompt": "x", **ONE, "bad_words": ["a" * 15_000] * 64}),
    "many biases": (COMPLETIONS, {"prompt": "x", **ONE, "logit_bias": {str(n): 1 for n in range(100_000)}}),
    "many allowed": (COMPLETIONS, {"prompt": "x", **ONE, "allowed_token_ids": list(range(300)) * 1000}),
    "names of tokens": ("/tokenize", {"prompt": "ab " * (SIZE // 12), "return_token_strs": True}),
    "text of tokens": ("/detokenize", {"tokens": [1] * (SIZE // 3)}),
    "unknown fields": (COMPLETIONS, {"prompt": "x", **ONE} | {f"k{n}": n for n in range(70_000)}),
    "brackets": (COMPLETIONS, "[" * SIZE),
    "braces": (COMPLETIONS, '{"a":' * (SIZE // 5)),
    "a number": (COMPLETIONS, '{"prompt":"x","seed":' + "9" * SIZE + "}"),
    "one key": (COMPLETIONS, "{" + '"prompt":"x",' * (SIZE // 13) + '"max_tokens":1}'),
    "halves of characters": (COMPLETIONS, '{"prompt":"' + "\\ud800" * (SIZE // 6) + '"}'),
}  # fmt: skip


@pytest.fixture(scope="module")
def http():
    cfg = preset("tiny").replace(eos_token_id=tiny_tokenizer().eos_ids)
    llm = LLM(random_model(11, cfg), tiny_tokenizer(), max_num_seqs=4, max_model_len=512)
    with AsyncEngine(llm) as engine, served(engine) as http:
        yield http


@pytest.mark.parametrize("name", CASES)
def test_it_is_answered_and_so_are_others(http, name):
    path, body = CASES[name]
    content = body if isinstance(body, str) else json.dumps(body)
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=http.base_url, timeout=SECONDS) as other:
        slow = pool.submit(http.post, path, content=content, headers={"Content-Type": "application/json"})
        while not slow.done():
            assert other.get("/health").status_code == 200
            assert other.post(COMPLETIONS, json={"prompt": "y", **ONE}).status_code == 200
    assert slow.result().status_code in (200, 400), slow.result().text
    assert len(slow.result().text) < 2000 or slow.result().status_code == 200  # a refusal does not send it all back
