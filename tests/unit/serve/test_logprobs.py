"""Log-probabilities, token ids and echoes over HTTP, checked against the model and against each other."""

import json

import httpx
import openai
import pytest
import torch

from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from tests.support.models import random_model
from tests.support.running import logprobs_of
from tests.support.serving import served
from tests.support.tokenizers import tiny_tokenizer
from tests.unit.serve.asking import ASK, RequestBuilder, joined

TOKENIZER = tiny_tokenizer()
CLOSE = 1e-3  # float32; prompts and answers are computed in differently shaped batches
PROMPT = "the answer is: Berlin"
FIELDS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def http(model_server):
    with httpx.Client(base_url=model_server[0], timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def chat(http):
    return RequestBuilder(http, messages=ASK, **FIELDS)


@pytest.fixture(scope="module")
def text(http):
    return RequestBuilder(http, "/v1/completions", prompt=PROMPT, **FIELDS)


def expected(prompt_ids, answer_ids):
    """Log-probability of each token of both but the first, and all of them in each place."""
    ids = [*prompt_ids, *answer_ids]
    every = logprobs_of(random_model(11), ids)
    return [float(every[at, token]) for at, token in enumerate(ids[1:])], every


def assert_same(got, want):
    """Equal but for the last digits of numbers: batches differ between two requests."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        got, want = list(got.values()), list(want.values())
    if isinstance(want, list):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    else:
        assert got == (pytest.approx(want, abs=CLOSE) if isinstance(want, float) else want)


def test_chat_logprobs_are_the_models(chat):
    answer = chat.answer(logprobs=True, top_logprobs=3)
    choice = answer["choices"][0]
    entries, ids = choice["logprobs"]["content"], choice["token_ids"]
    want, every = expected(answer["prompt_token_ids"], ids)
    assert [entry["logprob"] for entry in entries] == pytest.approx(want[-6:], abs=CLOSE)
    for place, (entry, token_id) in enumerate(zip(entries, ids, strict=True), start=-7):
        assert bytes(entry["bytes"]) == TOKENIZER.bytes_of(token_id)
        best = every[place].topk(3)
        assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=CLOSE)
        assert [bytes(other["bytes"]) for other in entry["top_logprobs"]] == [
            TOKENIZER.bytes_of(other) for other in best.indices.tolist()
        ]
        assert entry["top_logprobs"][0]["token"] == entry["token"], "greedy"


def test_without_alternatives_and_without_any(chat):
    content = chat.answer(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 6
    assert chat.answer()["choices"][0]["logprobs"] is None
    assert chat.answer(logprobs=False, top_logprobs=0)["choices"][0]["logprobs"] is None


def test_a_stream_says_the_same(chat):
    fields = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "n": 2, "temperature": 1.0, "seed": 4}
    whole, chunks = chat.answer(**fields), chat.chunks(**fields)
    choices = joined(chunks)
    for choice in whole["choices"]:
        streamed = choices[choice["index"]]
        assert_same(streamed["logprobs"], choice["logprobs"]["content"])
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [token_id for part in parts for token_id in part["token_ids"]] == choice["token_ids"]
    (found,) = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    assert_same(found, whole["prompt_logprobs"])
    first = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert first == [whole["prompt_token_ids"]] * 2


def test_prompt_logprobs(chat, text):
    for asker in (chat, text):
        answer = asker.answer(prompt_logprobs=2)
        holder = answer if asker is chat else answer["choices"][0]
        ids, rows = holder["prompt_token_ids"], holder["prompt_logprobs"]
        want, _ = expected(ids, [])
        assert rows[0] is None
        assert [row[str(token)]["logprob"] for row, token in zip(rows[1:], ids[1:], strict=True)] == pytest.approx(
            want, abs=CLOSE
        )
        assert all(2 <= len(row) <= 3 for row in rows[1:])
        assert all({entry["rank"] for entry in row.values()} >= {1, 2} for row in rows[1:])


def test_text_logprobs(text):
    choice = text.answer(logprobs=2)["choices"][0]
    found = choice["logprobs"]
    want, _ = expected(TOKENIZER.encode(PROMPT), choice["token_ids"])
    assert found["token_logprobs"] == pytest.approx(want[-6:], abs=CLOSE)
    assert found["text_offset"][0] == 0
    for offset, token_id, name in zip(found["text_offset"], choice["token_ids"], found["tokens"], strict=True):
        spelled = TOKENIZER.decode([token_id])
        if "\ufffd" not in spelled and token_id not in TOKENIZER._special_ids:
            assert name == spelled
            assert choice["text"][offset:].startswith(spelled)
    assert all(2 <= len(row) <= 3 for row in found["top_logprobs"])
    assert all(found["tokens"][i] in row for i, row in enumerate(found["top_logprobs"]))
    chunks = text.chunks(logprobs=2)
    parts = [part["logprobs"] for chunk in chunks for part in chunk["choices"]]
    assert_same({key: [value for part in parts for value in part[key]] for key in found}, found)


def test_an_evaluation_harness(http):
    """What lm-eval sends: prompt and continuation as ids, `echo`, one token more; it reads what lies between."""
    context, continuation = TOKENIZER.encode("the answer"), TOKENIZER.encode(" is: Berlin")
    body = {"prompt": [context + continuation, context], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choices = RequestBuilder(http, "/v1/completions").answer(**body)["choices"]
    want, every = expected(context, continuation)
    for choice, ids in zip(choices, (context + continuation, context), strict=True):
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(want[: len(ids) - 1], abs=CLOSE)
        assert choice["text"].startswith(TOKENIZER.decode(ids))
    scored = choices[0]["logprobs"]
    for at in range(len(context), len(context) + len(continuation)):
        likeliest = max(scored["top_logprobs"][at].items(), key=lambda item: item[1])[0]
        is_greedy = int(every[at - 1].argmax()) == [*context, *continuation][at]
        assert (likeliest == scored["tokens"][at]) == is_greedy


def test_scoring_without_an_answer(text):
    answer = text.answer(echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT, "length", [])
    assert len(choice["logprobs"]["tokens"]) == len(TOKENIZER.encode(PROMPT)) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    (chunk,) = text.chunks(echo=True, logprobs=0, max_tokens=0)
    assert chunk["choices"][0]["logprobs"] == choice["logprobs"]


def test_what_was_written_scores_as_it_was_written(text):
    """Tokens of an answer have the log-probability that they have in a prompt."""
    choice = text.answer(logprobs=0, temperature=1.0, seed=3)["choices"][0]
    ids = [*TOKENIZER.encode(PROMPT), *choice["token_ids"]]
    again = text.answer(prompt=ids, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert again["logprobs"]["token_logprobs"][-6:] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=CLOSE)


def test_echo_shows_the_prompt(text):
    plain = text.answer()["choices"][0]["text"]
    assert text.answer(echo=True)["choices"][0]["text"] == PROMPT + plain
    assert "".join(part["text"] for chunk in text.chunks(echo=True) for part in chunk["choices"]) == PROMPT + plain
    two = text.answer(echo=True, n=2, temperature=1.0, logprobs=0)["choices"]
    assert all(choice["text"].startswith(PROMPT) for choice in two)
    num_prompt = len(TOKENIZER.encode(PROMPT))
    first, second = (choice["logprobs"]["token_logprobs"][:num_prompt] for choice in two)
    assert first == second


def test_tokens_by_their_ids(chat, text):
    choice = chat.answer(logprobs=True, return_tokens_as_token_ids=True)["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    choice = text.answer(logprobs=1, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_parts_of_characters_have_names_of_their_own(text):
    """Two tokens that are no text by themselves are not confused, as both would be with U+FFFD."""
    parts = [token for token in range(TOKENIZER.vocab_size) if TOKENIZER.bytes_of(token) in (b"\xe2", b"\xe3")]
    fields = {"allowed_token_ids": parts, "logprobs": 2, "max_tokens": 3, "temperature": 1.0}
    found = text.answer(**fields)["choices"][0]["logprobs"]
    assert set(found["tokens"]) <= {"bytes:\\xe2", "bytes:\\xe3"}


def test_the_openai_client_reads_them(model_server):
    with openai.OpenAI(base_url=model_server[0] + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        ask = {"model": "tiny", "max_tokens": 4, "seed": 2}
        answer = client.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=2, n=2, **ask)
        assert [choice.index for choice in answer.choices] == [0, 1]
        for choice in answer.choices:
            assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        chunks = list(client.chat.completions.create(messages=ASK, logprobs=True, stream=True, **ask))
        assert sum(len(chunk.choices[0].logprobs.content) for chunk in chunks if chunk.choices[0].logprobs) >= 1
        answer = client.completions.create(prompt=["the", "an"], logprobs=1, echo=True, **ask)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[1].text.startswith("an")
        assert answer.choices[0].logprobs.token_logprobs[0] is None
        assert json.loads(answer.model_dump_json())["object"] == "text_completion"


def test_the_comparison_notices_another_model(chat):
    """The control: log-probabilities of a model with other weights are far away."""
    answer = chat.answer(logprobs=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    ids = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
    other = logprobs_of(random_model(12), ids)
    want = torch.tensor([float(other[at, token]) for at, token in enumerate(ids[1:])])[-6:]
    assert (want - torch.tensor([entry["logprob"] for entry in entries])).abs().max() > 100 * CLOSE


@pytest.fixture(scope="module")
def processed():
    """A server whose log-probabilities are those of the sampling distribution, of tokens named by their ids."""
    llm = LLM(random_model(11), TOKENIZER, max_num_seqs=4)
    flags = {"logprobs_mode": "processed_logprobs", "return_tokens_as_token_ids": True}
    with AsyncEngine(llm) as engine, served(engine, **flags) as http:
        yield http


def test_processed_logprobs_are_those_that_were_sampled_from(processed):
    fields = {
        "temperature": 2.0,
        "top_k": 2,
        "seed": 4,
        "n": 2,
        **dict.fromkeys(("ignore_eos", "return_token_ids"), True),
    }
    chat = RequestBuilder(processed, messages=ASK, max_tokens=6, logprobs=True, top_logprobs=3, **fields)
    whole = chat.answer()
    for index, streamed in joined(chunks := chat.chunks()).items():
        choice = whole["choices"][index]
        ids, content = choice["token_ids"], choice["logprobs"]["content"]
        every = logprobs_of(random_model(11), [*whole["prompt_token_ids"], *ids])[-7:-1]
        for token_id, entry, own in zip(ids, content, every, strict=True):
            best = torch.as_tensor(own).topk(2)
            want = dict(zip(best.indices.tolist(), (best.values / 2).log_softmax(-1).tolist(), strict=True))
            assert entry["token"] == f"token_id:{token_id}"
            assert entry["logprob"] == pytest.approx(want[token_id], abs=CLOSE)
            told = [top["logprob"] for top in entry["top_logprobs"]]
            assert told == [*(pytest.approx(value, abs=CLOSE) for value in want.values()), -9999.0]
        assert_same(streamed["logprobs"], content)
        assert choice["prompt_token_ids"] == whole["prompt_token_ids"]
    first = [part for chunk in chunks for part in chunk["choices"] if "prompt_token_ids" in part]
    assert [part["prompt_token_ids"] for part in first] == [whole["prompt_token_ids"]] * 2


def test_processed_text_and_prompts(processed):
    prompts = [TOKENIZER.encode(PROMPT), [1, 2, 3]]
    fields = {"temperature": 2.0, "seed": 4, "n": 2, "ignore_eos": True, "return_token_ids": True, "max_tokens": 4}
    text = RequestBuilder(processed, "/v1/completions", prompt=prompts, logprobs=0, prompt_logprobs=0, **fields)
    choices = text.answer()["choices"]
    for number, choice in enumerate(choices):
        ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
        assert choice["prompt_token_ids"] == prompts[number // 2]
        scaled = (torch.as_tensor(logprobs_of(random_model(11), ids)) / 2).log_softmax(-1)
        want = [float(scaled[place, token_id]) for place, token_id in enumerate(ids[1:])]
        told = [
            row[str(token_id)]["logprob"] for token_id, row in zip(ids, choice["prompt_logprobs"], strict=False) if row
        ]
        assert told + choice["logprobs"]["token_logprobs"] == pytest.approx(want, abs=CLOSE)
        assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    asked = {"prompt": PROMPT, "logprobs": 0, "max_tokens": 2, "return_tokens_as_token_ids": False}
    named = processed.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]["tokens"]
    assert not [name for name in named if name.startswith("token_id:")], "the request decides"


SEVERAL = {"prompt": PROMPT, "max_tokens": 2}
ROUTES = [
    ("/v1/completions", "logprobs", lambda n: SEVERAL | {"logprobs": n}),
    ("/v1/completions", "prompt_logprobs", lambda n: SEVERAL | {"prompt_logprobs": n}),
    ("/v1/chat/completions", "top_logprobs", lambda n: {"messages": ASK, "logprobs": True, "top_logprobs": n}),
    ("/v1/responses", "top_logprobs", lambda n: {"input": "hi", "top_logprobs": n}),
    ("/generate", "top_logprobs_num", lambda n: {"text": "hi", "return_logprob": True, "top_logprobs_num": n}),
    (
        "/inference/v1/generate",
        "sampling_params.logprobs",
        lambda n: {"token_ids": [1], "sampling_params": {"logprobs": n}},
    ),
]


def test_as_many_as_the_engine_allows_and_no_more():
    """TRL asks for 100."""
    llm = LLM(random_model(11), TOKENIZER, max_num_seqs=4, max_model_len=128, max_logprobs=100)
    with AsyncEngine(llm) as engine, served(engine) as http:
        (first, *_) = http.post("/v1/completions", json=SEVERAL | {"logprobs": 100}).json()["choices"]
        assert len(first["logprobs"]["top_logprobs"][0]) in (100, 101)  # with the token itself
        for path, param, body in ROUTES:
            answer = http.post(path, json=body(101))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert "is 101; allowed: null, or 0 to 100 (max_logprobs of the engine)" in error["message"]


def test_no_more_than_there_are_tokens():
    with LLM(random_model(11), TOKENIZER, max_logprobs=1000) as llm:
        assert llm.client.info.max_logprobs == 320
