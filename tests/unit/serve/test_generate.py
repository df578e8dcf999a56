"""vLLM's /inference/v1/generate: token ids in, token ids and the log-probabilities that they were sampled with out."""

import base64
import json
import math

import httpx
import numpy as np
import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from tests.support.models import random_model
from tests.support.serving import bearer, key, served
from tests.support.tokenizers import tiny_tokenizer
from tests.unit.serve.asking import events_of

PATH = "/inference/v1/generate"
IDS = tiny_tokenizer().encode("the answer is: Berlin")
VOCABULARY, CONTEXT = 320, 1024
BUDGET = 1e-4  # float32, in the server's batches


@pytest.fixture(scope="module")
def http():
    """A server that asks for a key, records experts and returns sampling masks."""
    cfg = preset("tiny").replace(eos_token_id=tiny_tokenizer().eos_ids)
    llm = LLM(random_model(11, cfg), tiny_tokenizer(), max_num_seqs=4, enable_return_routed_experts=True)
    flags = {"enable_return_routed_experts": True, "return_sampling_mask": True}
    with AsyncEngine(llm) as engine, served(engine, key("user"), **flags) as client:
        client.headers.update(bearer("user"))
        yield client


def post(http, ids=IDS, *, status=200, **fields):
    """The answer, or the error; `sampling` are the sampling parameters."""
    sampling = {"max_tokens": 6, "logprobs": 1, "seed": 3, "ignore_eos": True} | fields.pop("sampling", {})
    answer = http.post(PATH, json={"token_ids": ids, "sampling_params": sampling, **fields})
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def streamed(http, **fields):
    body = {"token_ids": IDS, "stream": True, **fields}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    *events, done = events_of(answer.text)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def logprobs_of(choice):
    """Checked as the clients do: by place, by name, and for what is no log-probability."""
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    values = [entry["logprob"] for entry in content]
    assert all(type(value) is float and math.isfinite(value) and -9999 < value <= 0 for value in values)
    return values


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"temperature": 0}, {"temperature": 2.0, "top_k": 3}])
def test_logprobs_are_of_the_sampling_distribution(http, sampling):
    choice = post(http, sampling=sampling)["choices"][0]
    ids = [*IDS, *choice["token_ids"]]
    logits_TW = random_model(11, preset("tiny")).logits(ids[:-1]).double()[len(IDS) - 1 :]
    drawn_TW = logits_TW / (sampling.get("temperature", 1.0) or 1.0)
    if top_k := sampling.get("top_k"):
        drawn_TW[drawn_TW < drawn_TW.topk(top_k).values[:, -1:]] = -torch.inf
    tokens_T1 = torch.tensor(choice["token_ids"])[:, None]
    told = torch.tensor(logprobs_of(choice), dtype=torch.float64)
    assert (told - drawn_TW.log_softmax(-1).gather(1, tokens_T1)[:, 0]).abs().max() < BUDGET
    if sampling.get("temperature"):
        own = logits_TW.log_softmax(-1).gather(1, tokens_T1)[:, 0]
        assert (told - own).abs().max() > 100 * BUDGET  # the control


def test_every_field(http):
    answer = post(
        http,
        sampling={"logprobs": 3, "prompt_logprobs": 0, "temperature": 1.5, "top_k": 2},
        model="tiny",
        request_id="mine",
        return_token_ids=True,
        cache_salt="s",
        priority=3,
    )
    assert answer["request_id"] == "generate-tokens-mine"
    assert answer["model"] == "tiny"
    assert answer["prompt_token_ids"] == IDS
    assert answer["usage"]["prompt_tokens"] == len(IDS)
    assert answer["usage"]["completion_tokens"] == 6
    first, *rows = answer["prompt_logprobs"]
    assert first is None
    assert [set(row) for row in rows] == [{str(token_id)} for token_id in IDS[1:]]
    choice = answer["choices"][0]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    for entry in choice["logprobs"]["content"]:
        likeliest = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(likeliest) == 3
        assert likeliest == sorted(likeliest, reverse=True)
        assert likeliest[2] == -9999.0, "it could not be sampled"
        assert sum(map(math.exp, likeliest)) == pytest.approx(1.0, abs=BUDGET)
    plain = post(http, sampling={"logprobs": None})
    assert "prompt_token_ids" not in plain
    assert plain["choices"][0]["logprobs"] is None


def test_the_stop_token_is_part_of_the_answer(http):
    ids = post(http)["choices"][0]["token_ids"]
    stop = ids[3]
    choice = post(http, sampling={"stop_token_ids": [stop], "skip_special_tokens": False})["choices"][0]
    assert choice["token_ids"] == ids[: ids.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert len(logprobs_of(choice)) == len(choice["token_ids"])


def test_a_stop_string_ends_the_answer_without_text(http):
    ids = post(http)["choices"][0]["token_ids"]
    word = tiny_tokenizer().decode(ids[2:3])
    choice = post(http, sampling={"stop": [word]})["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)
    assert word in tiny_tokenizer().decode(choice["token_ids"])


def test_a_stream_adds_up(http):
    sampling = {"max_tokens": 5, "logprobs": 1, "seed": 3, "n": 2, "ignore_eos": True, "prompt_logprobs": 0}
    fields = {"sampling_params": sampling, "return_token_ids": True}
    whole = http.post(PATH, json={"token_ids": IDS, **fields}).json()
    *chunks, last = streamed(http, **fields, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 10
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [IDS]
    assert len([chunk for chunk in chunks if "prompt_logprobs" in chunk]) == 1
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [token_id for part in parts for token_id in part["token_ids"]] == choice["token_ids"]
        told = [value for part in parts for value in logprobs_of(part)]
        assert told == pytest.approx(logprobs_of(choice), abs=BUDGET)
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert [part["routed_experts"] for part in parts if "routed_experts" in part] == [choice["routed_experts"]]
    assert whole["choices"][0]["token_ids"] != whole["choices"][1]["token_ids"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 5, "temperature": 2.0},
        {"top_k": 40, "top_p": 0.7, "n": 2},
        {"top_k": 300, "min_p": 0.2, "temperature": 0.6, "logit_bias": {"5": 3.0}, "allowed_token_ids": [*range(60)]},
        {"top_k": 9, "stop": [" "], "max_tokens": 100},
    ],
    ids=str,
)
def test_masks_hold_what_tokens_were_drawn_from(sampling, http):
    """A trainer that normalizes over the mask finds the log-probabilities that were told."""
    for choice in post(http, sampling=sampling)["choices"]:
        token_ids, masks, told = choice["token_ids"], choice["sampling_mask"], logprobs_of(choice)
        logits_TW = random_model(11, preset("tiny")).logits([*IDS, *token_ids][:-1]).double()[len(IDS) - 1 :]
        logits_TW[:, 5] += sampling.get("logit_bias", {}).get("5", 0.0)
        logits_TW /= sampling.get("temperature", 1.0)
        for token_id, mask, logprob, logits_W in zip(token_ids, masks, told, logits_TW, strict=True):
            assert mask == sorted(set(mask))
            assert len(mask) <= sampling["top_k"]
            assert logits_W[mask].log_softmax(-1)[mask.index(token_id)].item() == pytest.approx(logprob, abs=BUDGET)
        assert any(
            abs(row.log_softmax(-1)[token_id].item() - logprob) > 100 * BUDGET
            for token_id, logprob, row in zip(token_ids, told, logits_TW, strict=True)
        )  # the control


def test_a_stream_has_the_masks_of_its_tokens(http):
    fields = {"sampling_params": {"max_tokens": 5, "logprobs": 1, "seed": 3, "top_k": 4, "ignore_eos": True}}
    (whole,) = http.post(PATH, json={"token_ids": IDS, **fields}).json()["choices"]
    parts = [part for chunk in streamed(http, **fields) for part in chunk["choices"]]
    assert all(len(part["sampling_mask"]) == len(part["token_ids"]) for part in parts)
    assert [mask for part in parts for mask in part["sampling_mask"]] == whole["sampling_mask"]


def test_a_mask_of_all_tokens_is_none(http, model_server):
    for sampling in ({}, {"temperature": 0, "top_k": 3}, {"top_k": -1, "top_p": 1.0, "min_p": 0.0}):
        assert post(http, sampling=sampling)["choices"][0]["sampling_mask"] is None
    with httpx.Client(base_url=model_server[0], timeout=60) as without:
        assert "sampling_mask" not in post(without, sampling={"top_k": 3})["choices"][0]


def experts_of(choice):
    routed = choice["routed_experts"]
    rows = np.frombuffer(base64.b64decode(routed["data"]), dtype=routed["dtype"]).reshape(routed["shape"])
    return routed["start"], rows


def test_routed_experts_are_those_of_the_other_apis(http):
    raw = http.post(PATH, json={"token_ids": IDS, "sampling_params": {"max_tokens": 4, "n": 2, "seed": 3}})
    assert b'"routed_experts":{"data":"' in raw.content
    choices = raw.json()["choices"]
    for choice in choices:
        ids = [*IDS, *choice["token_ids"]]
        start, rows = experts_of(choice)
        cfg = preset("tiny")
        assert (start, rows.dtype, rows.shape) == (0, np.uint8, (len(ids) - 1, cfg.num_hidden_layers, 2))
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_routed_experts": True}
        meta = http.post("/generate", json=body).json()["meta_info"]
        want = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4").reshape(-1, *rows.shape[1:])
        assert (rows == want).all()
    sampling = {"n": 1, "routed_experts_prompt_start": len(IDS) - 1, "max_tokens": 4}
    start, rows = experts_of(post(http, sampling=sampling)["choices"][0])
    assert (start, len(rows)) == (len(IDS) - 1, 4)
    assert (rows == experts_of(choices[0])[1][start:]).all()


def test_without_records_there_are_no_experts(model_server):
    with httpx.Client(base_url=model_server[0], timeout=60) as http:
        choice = post(http, sampling={"routed_experts_prompt_start": 1})["choices"][0]
    assert "routed_experts" not in choice


def test_defaults_are_vllms_and_the_answer_may_fill_the_context(http, scripted_server, engine):
    engine.script = "abc"
    httpx.post(scripted_server[0] + PATH, json={"token_ids": [1, 2, 3]}, timeout=60).raise_for_status()
    params = engine.params
    assert (params.temperature, params.top_p, params.n, params.detokenize) == (1.0, 1.0, 1, False)
    assert params.max_tokens == engine.max_model_len - 3
    answer = post(http, [1] * (CONTEXT - 3), sampling={"max_tokens": 100})
    assert (len(answer["choices"][0]["token_ids"]), answer["choices"][0]["finish_reason"]) == (3, "length")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"sampling": {"max_tokns": 4}}, "sampling_params.max_tokns", "did you mean max_tokens?"),
        ({"sampling": {"reasoning_effort": "low"}}, "sampling_params.reasoning_effort", "is no sampling parameter"),
        ({"sampling": {"truncate_prompt_tokens": 4}}, "sampling_params.truncate_prompt_tokens", "is no sampling"),
        ({"sampling": {"temperature": -1}}, "sampling_params.temperature", "allowed: 0 (greedy) to 100"),
        ({"sampling": {"max_tokens": 0}}, "sampling_params.max_tokens", "allowed: at least 1"),
        ({"sampling": {"logprobs": 21}}, "sampling_params.logprobs", "is 21; allowed: null, or 0 to 20"),
        ({"sampling": {"stop_token_ids": [VOCABULARY]}}, "sampling_params.stop_token_ids", "holds 320"),
        ({"sampling": {"structured_outputs": 5}}, "sampling_params.structured_outputs", "allowed: an object"),
        ({"sampling": {"structured_outputs": {"x": 1}}}, "sampling_params.structured_outputs", "x is not known"),
        (
            {"sampling": {"routed_experts_prompt_start": 99}},
            "sampling_params.routed_experts_prompt_start",
            "the prompt's length",
        ),
        ({"ids": []}, "token_ids", "allowed: a list of integers, at least one"),
        ({"ids": [1, True]}, "token_ids", "allowed: a list of integers, at least one"),
        ({"ids": [1.0]}, "token_ids", "allowed: a list of integers, at least one"),
        ({"ids": [1, VOCABULARY]}, "token_ids", "allowed: 0 to 319"),
        ({"ids": [-1]}, "token_ids", "allowed: 0 to 319"),
        ({"ids": "text"}, "token_ids", "allowed: a list"),
        ({"ids": [1] * CONTEXT}, "token_ids", "the context holds 1024 tokens"),
        ({"sampling": {"top_p": 0.9}}, "sampling_params.top_k", "is 0; allowed: 1 to 2048 with sampling masks"),
        ({"sampling": {"top_k": 2049}}, "sampling_params.top_k", "is 2049; allowed: 1 to 2048 with sampling masks"),
        ({"features": {}}, "features", "is not supported"),
        ({"return_sampling_mask": True}, "return_sampling_mask", "is not supported"),
        ({"stream_options": {}}, "stream_options", "are for streams"),
        ({"sampling_params": [1]}, "sampling_params", "allowed: an object"),
        ({"priority": 2**63}, "priority", "a 64-bit integer"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(http, fields, param, said):
    error = post(http, status=400, **fields)
    assert error["param"] == param
    assert said in error["message"]


def test_an_aborted_answer_is_an_error(scripted_server, engine):
    engine.script, engine.finish_reason = "abc", "abort"
    with httpx.Client(base_url=scripted_server[0], timeout=60) as client:
        answer = client.post(PATH, json={"token_ids": [1]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_aborted")
        text = client.post(PATH, json={"token_ids": [1], "stream": True}).text
    assert json.loads(events_of(text)[-2])["error"]["code"] == "request_aborted"


def test_a_key_is_needed_and_the_answer_is_counted(http):
    answer = http.post(PATH, json={"token_ids": [1]}, headers=bearer("another"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")

    def tokens() -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    before = tokens()
    post(http)
    assert tokens() == before + 6


def test_random_bodies_are_answered_or_refused(http, rng):
    """No 5xx, and every answer passes the clients' checks."""
    pool = {
        "temperature": [0, 0.3, 1.0, 5, "hot", None],
        "top_p": [1.0, 0.4, 0, 1e-9],
        "top_k": [-1, 0, 1, 3, 10**9],
        "min_p": [0.0, 0.5, 1.0],
        "n": [1, 2, 0],
        "logprobs": [0, 1, 20, None],
        "min_tokens": [0, 2, 99],
        "repetition_penalty": [1.0, 1.7],
        "logit_bias": [{"5": 100, "6": -100}, {"x": 1}, None],
        "allowed_token_ids": [[5, 6, 7], [], [VOCABULARY]],
        "stop_token_ids": [[5], []],
        "bad_words": [["the"], [""]],
    }
    answered = 0
    for _ in range(12):
        sampling = {name: rng.choice(values) for name, values in pool.items() if rng.random() < 0.3}
        body = {"token_ids": rng.choices(range(VOCABULARY), k=rng.randrange(1, 9))}
        answer = http.post(PATH, json=body | {"sampling_params": {"max_tokens": 3, "logprobs": 1} | sampling})
        assert answer.status_code in (200, 400), (sampling, answer.text)
        if answer.status_code == 200 and answer.json()["choices"][0]["logprobs"] is not None:
            answered += 1
            for choice in answer.json()["choices"]:
                assert choice["finish_reason"] in ("stop", "length")
                logprobs_of(choice)
    assert answered
