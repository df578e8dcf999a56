"""Text completions: prompts in all their forms, several at once, and every refusal by name."""

import asyncio
import json

import httpx
import pytest

from glm5.serve.completions.body import CompletionBody
from tests.support.tokenizers import tiny_tokenizer
from tests.unit.serve.asking import RequestBuilder

TOKENIZER = tiny_tokenizer()
SECONDS = 20


@pytest.fixture
def text(http, engine):
    engine.script, engine.finish_reason = "abc", "length"
    return RequestBuilder(http, "/v1/completions", prompt="the")


def test_the_shape_of_an_answer(text):
    answer = text.answer(request_id="mine")
    choice = {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer["choices"] == [choice]
    assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-mine", "text_completion", "tiny")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(TOKENIZER.encode("the")), 3)


@pytest.mark.parametrize(
    ("prompt", "want"),
    [("the", [["the"]]), (["the"], [["the"]]), ([5, 6], [[5, 6]]), ([[5, 6]], [[5, 6]]),
     (["the", "an"], [["the"], ["an"]]), ([[5], [6, 7]], [[5], [6, 7]]), (["the", [5]], [["the"], [5]])],
    ids=str,
)  # fmt: skip
def test_prompts_in_all_their_forms(text, engine, monkeypatch, prompt, want):
    requested, generate = [], engine.generate

    def noting(prompt_ids, params, **options):
        requested.append(list(prompt_ids))
        return generate(prompt_ids, params, **options)

    monkeypatch.setattr(engine, "generate", noting)
    answer = text.answer(prompt=prompt)
    ids = [TOKENIZER.encode(one[0]) if isinstance(one[0], str) else one for one in want]
    assert sorted(requested) == sorted(ids)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(want)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 3 * len(want)
    chunks = text.chunks(prompt=prompt)
    texts = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        texts[part["index"]] = texts.get(part["index"], "") + part["text"]
    assert texts == dict.fromkeys(range(len(want)), "abc")


def test_special_tokens_in_a_prompt_are_special(text, engine):
    text.answer(prompt="<|user|>hi")
    assert engine.prompt_ids[0] == TOKENIZER.id_of("<|user|>")


def test_the_usage_of_a_stream(text):
    assert not any("usage" in chunk for chunk in text.chunks())
    *chunks, last = text.chunks(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    each = text.chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in each] == [1, 2, 3, 3]


BAD = [
    ({"prompt": ...}, "prompt is missing", "prompt"),
    ({"prompt": []}, "prompt is []; allowed: a text, token ids, or a list of", "prompt"),
    ({"prompt": {}}, "prompt is {}; allowed: ", "prompt"),
    ({"prompt": [1, "a"]}, "prompt is [1, 'a']; allowed: ", "prompt"),
    ({"prompt": [[]]}, "prompt is [[]]; allowed: ", "prompt"),
    ({"prompt": [True]}, "prompt is [true]; allowed: ", "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt is a list of 1025; allowed: up to 1024", "prompt"),
    ({"max_tokens": -1}, "max_tokens is -1; allowed: at least 0", "max_tokens"),
    ({"best_of": 2}, "best_of is 2; allowed: n (1)", "best_of"),
    ({"suffix": "x"}, "suffix is not supported by this server: leave it out", "suffix"),
    ({"echo": "yes"}, "echo is 'yes'; allowed: true or false", "echo"),
    ({"temperature": -1}, "temperature is -1.0; allowed: ", "temperature"),
    ({"guided_json": "{", "guided_regex": "a"}, "both say what the answer must look like", "guided_regex"),
]


@pytest.mark.parametrize(("fields", "message", "param"), BAD, ids=lambda value: json.dumps(value, default=str)[:40])
def test_bad_requests_are_400_by_name(text, fields, message, param):
    if fields.get("prompt") is ...:
        text.always.clear()
        fields = {}
    error = text.refusal(**fields)
    assert message in error["message"]
    assert error["param"] == param


def test_neutral_values(text):
    neutral = {name: values[0] for name, values in CompletionBody.refused.items() if values}
    assert text.answer(**neutral, best_of=1)
    assert text.answer(**dict.fromkeys(CompletionBody.model_fields.keys() - {"prompt"}))


def test_what_does_not_fit_is_refused(text, engine):
    error = text.refusal(max_tokens=engine.max_model_len)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    error = text.refusal(prompt=["ok", [5] * 600])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = text.refusal(prompt="word " * 100_000)
    assert "the prompt has at least " in error["message"]


def test_what_ends_one_prompt_ends_all(text, engine):
    engine.fails = RuntimeError("secret")
    answer = text.http.post(text.path, json={"prompt": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_aborts_every_prompt(scripted_server, engine, stream):
    engine.script, engine.hangs = "abc", True

    async def main():
        async with httpx.AsyncClient(base_url=scripted_server[0], timeout=SECONDS) as client:
            body = {"prompt": ["a", "b", "c"], "stream": stream}
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            assert await asyncio.to_thread(engine.started.wait, SECONDS)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await asyncio.to_thread(engine.left.wait, SECONDS)

    asyncio.run(main())
