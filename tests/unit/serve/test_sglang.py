"""/generate as SGLang's clients see it: batches, streams, log-probabilities; what a trainer reads of an answer."""

import base64
import itertools
import json
import math
import threading

import httpx
import numpy as np
import pytest

from glm5.common.errors import EngineDead
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from tests.support.models import random_model
from tests.support.serving import bearer, key, scripted, served
from tests.support.tokenizers import tiny_tokenizer

SECONDS = 20
TOKENIZER = tiny_tokenizer()
TEXT = "the answer is: Berlin"
IDS = TOKENIZER.encode(TEXT)
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture
def real(model_server):
    with httpx.Client(base_url=model_server[0], timeout=60) as client:
        yield client


def generate(http, **body):
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(http, **body):
    answer = http.post("/generate", json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    *events, end = answer.text.split("\n\n")
    assert (events.pop(), end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def refusal(http, **body):
    reported = []
    for stream in (False, True):
        answer = http.post("/generate", json=body | {"stream": stream})
        assert answer.status_code == 400, answer.text
        reported.append(answer.json()["error"])
    assert reported[0] == reported[1]
    return reported[0]


def test_text_and_token_ids_are_the_same_prompt(real):
    by_text = generate(real, text=TEXT, sampling_params=GREEDY)
    by_ids = generate(real, input_ids=IDS, sampling_params=GREEDY)
    assert by_text["text"] == by_ids["text"]
    assert TOKENIZER.decode(by_ids["output_ids"], skip_special=True) == by_ids["text"]
    meta = by_ids["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(IDS), 8)
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]
    assert meta["e2e_latency"] > 0
    assert len(by_ids["output_ids"]) == 8
    assert "output_token_logprobs" not in meta


def test_every_chunk_holds_all_before_it(real):
    whole = generate(real, input_ids=IDS, sampling_params=GREEDY, return_logprob=True, top_logprobs_num=2)
    found = chunks(real, input_ids=IDS, sampling_params=GREEDY, return_logprob=True, top_logprobs_num=2)
    for before, after in itertools.pairwise(found):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        reported, longer = (chunk["meta_info"]["output_token_logprobs"] for chunk in (before, after))
        assert longer[: len(reported)] == reported
        assert before["meta_info"]["finish_reason"] is None
        assert len(before["output_ids"]) == before["meta_info"]["completion_tokens"]
    last, meta = found[-1], whole["meta_info"]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    for name in ("finish_reason", "prompt_tokens", "completion_tokens", "weight_versions"):
        assert last["meta_info"][name] == meta[name]
    for reported, expected in zip(
        last["meta_info"]["output_token_logprobs"], meta["output_token_logprobs"], strict=True
    ):
        assert reported == [pytest.approx(expected[0], abs=1e-5), *expected[1:]]
    assert len(last["meta_info"]["output_top_logprobs"]) == 8


def test_log_probabilities_are_triples_of_what_was_drawn_at_its_temperature(real):
    drawn = {"temperature": 2.0, "max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 3}
    requested = {"input_ids": IDS, "return_logprob": True, "top_logprobs_num": 3, "return_text_in_logprobs": True}
    meta = generate(real, **requested, sampling_params=drawn)["meta_info"]
    triples = meta["output_token_logprobs"]
    ids = [token_id for _, token_id, _ in triples]
    assert len(triples) == meta["output_token_logprobs_length"] == 6
    assert all(text == TOKENIZER.decode([token_id]) for _, token_id, text in triples)
    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []
    assert all(len(row) == 3 and row == sorted(row, key=lambda one: -one[0]) for row in meta["output_top_logprobs"])
    # As a prompt, the same tokens have their log-probabilities at temperature 1: l / 2 - log sum exp(l / 2) is known of
    # differences alone, so two likeliest tokens are half as far apart at temperature 2.
    scored = {"temperature": 1.0, "max_new_tokens": 0}
    plain = generate(
        real, input_ids=IDS + ids, return_logprob=True, logprob_start_len=0, top_logprobs_num=3, sampling_params=scored
    )
    at_one = plain["meta_info"]["input_top_logprobs"][len(IDS) :]
    for hot, cold in zip(meta["output_top_logprobs"], at_one, strict=True):
        assert [token_id for _, token_id, _ in hot] == [token_id for _, token_id, _ in cold]
        assert hot[0][0] - hot[1][0] == pytest.approx((cold[0][0] - cold[1][0]) / 2, abs=1e-4)
        assert math.exp(hot[0][0]) < math.exp(cold[0][0])


def test_a_prompt_is_scored_without_an_answer(real):
    """What a teacher is asked for: no token is wanted, and every token of the prompt has its figure but the first."""
    answer = generate(
        real,
        input_ids=IDS,
        return_logprob=True,
        logprob_start_len=0,
        sampling_params={"max_new_tokens": 0, "skip_special_tokens": False},
    )
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert (meta["finish_reason"], meta["completion_tokens"]) == ({"type": "length", "length": 0}, 0)
    scored = meta["input_token_logprobs"]
    assert [token_id for _, token_id, _ in scored] == IDS
    assert scored[0][0] is None
    assert all(value < 0 for value, _, _ in scored[1:])
    later = generate(
        real, input_ids=IDS, return_logprob=True, logprob_start_len=5, sampling_params={"max_new_tokens": 1}
    )["meta_info"]["input_token_logprobs"]
    assert [token_id for _, token_id, _ in later] == IDS[5:]
    assert later[0][0] is None
    assert [value for value, _, _ in later[1:]] == pytest.approx([value for value, _, _ in scored[6:]], abs=1e-5)


def test_a_batch_is_a_list_in_the_order_of_the_prompts(real):
    texts = ["one", "the answer", "x"]
    alone = [generate(real, text=text, sampling_params=GREEDY)["text"] for text in texts]
    assert [one["text"] for one in generate(real, text=texts, sampling_params=GREEDY)] == alone
    params = [GREEDY | {"max_new_tokens": length} for length in (1, 2, 3)]
    ids = [TOKENIZER.encode(text) for text in texts]
    some = generate(
        real, input_ids=ids, sampling_params=params, rid=["a", "b", "c"], return_logprob=[True, False, True]
    )
    assert [one["meta_info"]["completion_tokens"] for one in some] == [1, 2, 3]
    assert [one["meta_info"]["id"] for one in some] == ["a", "b", "c"]
    assert ["output_token_logprobs" in one["meta_info"] for one in some] == [True, False, True]
    last = {}
    for chunk in chunks(real, text=texts, sampling_params=GREEDY, rid="r"):
        last[chunk["index"]] = chunk
    assert [last[index]["text"] for index in range(3)] == alone
    assert [last[index]["meta_info"]["id"] for index in range(3)] == ["r_0", "r_1", "r_2"]


def test_several_answers_to_one_prompt(real):
    drawn = {"temperature": 1.5, "n": 3, "max_new_tokens": 5, "sampling_seed": 1, "ignore_eos": True}
    answers = generate(real, text=TEXT, sampling_params=drawn, rid="r")
    assert [one["meta_info"]["id"] for one in answers] == ["r_0", "r_1", "r_2"]
    assert len({one["text"] for one in answers}) > 1
    two = generate(real, text=["one", "two"], sampling_params=drawn)
    assert len(two) == 6
    assert {chunk["index"] for chunk in chunks(real, text=TEXT, sampling_params=drawn)} == {0, 1, 2}


def test_sampling_parameters_have_sglangs_names_and_defaults(http, engine):
    engine.script = "abc"
    generate(http, text="x")
    params = engine.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, -1, 128)
    given = {
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 1.1, "stop": ["Q", "A:"],
        "stop_token_ids": [7], "ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True,
        "logit_bias": {"3": 1.0}, "sampling_seed": 4, "spaces_between_special_tokens": False, "regex": "a+",
    }  # fmt: skip
    generate(http, text="x", sampling_params=given, priority=3, cache_salt="s", extra_key="k")
    params = engine.params
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (
        9, 2, 0.5, 0.9, 5, 0.1)  # fmt: skip
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("Q", "A:"), (7,), True)
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (False, True)
    assert (params.logit_bias, params.seed, params.structured_outputs.regex) == ({3: 1.0}, 4, "a+")
    assert engine.options["priority"] == -3
    assert engine.options["cache_salt"] == "/k/s"
    generate(http, text="x", sampling_params={"max_new_tokens": None})
    assert engine.params.max_tokens == engine.max_model_len - 1
    generate(http, input_ids=[1] * 500)
    assert engine.params.max_tokens == 12


def test_why_an_answer_ended(real, http, engine):
    engine.script = "abc<|user|>"
    assert generate(http, text="x")["meta_info"]["finish_reason"] == {
        "type": "stop",
        "matched": TOKENIZER.id_of("<|user|>"),
    }
    engine.finish_reason = "abort"
    assert generate(http, text="x")["meta_info"]["finish_reason"]["type"] == "abort"
    whole = generate(real, text=TEXT, sampling_params=GREEDY)
    stop = whole["text"][2:4]
    for trims in (True, False):
        some = generate(real, text=TEXT, sampling_params=GREEDY | {"stop": stop, "no_stop_trim": not trims})
        assert some["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert some["text"] == whole["text"].partition(stop)[0] + ("" if trims else stop)
    token_id = whole["output_ids"][3]
    some = generate(real, text=TEXT, sampling_params=GREEDY | {"stop_token_ids": [token_id]})
    assert some["meta_info"]["finish_reason"] == {"type": "stop", "matched": token_id}
    assert some["output_ids"][-1] == token_id


BAD = [
    ({}, "text and input_ids: exactly one of them is needed", "text"),
    ({"text": "x", "input_ids": [1]}, "text and input_ids: exactly one", "text"),
    ({"text": 3}, "text is 3; allowed: a text, or a list of texts", "text"),
    ({"input_ids": []}, "input_ids is []; allowed: a list of integers, or a list", "input_ids"),
    ({"input_ids": [999]}, "the prompt holds the token id 999; allowed: 0 to ", "input_ids"),
    ({"text": "x", "sampling_params": 3}, "sampling_params is 3; allowed: an object", "sampling_params"),
    ({"text": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature is -1.0; allowed: ",
     "sampling_params.temperature"),
    ({"text": "x", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens is -1",
     "sampling_params.max_new_tokens"),
    ({"text": "x", "sampling_params": {"max_new_tokens": 5, "min_new_tokens": 6}},
     "sampling_params.min_new_tokens is 6; allowed: ", "sampling_params.min_new_tokens"),
    ({"text": "x", "sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params is not supported",
     "sampling_params.custom_params"),
    ({"text": "x", "sampling_params": {"stop_regex": "a+"}}, "sampling_params.stop_regex is not supported",
     "sampling_params.stop_regex"),
    ({"text": "x", "sampling_params": {"regex": "a", "ebnf": "b"}}, "regex and ebnf both say", "sampling_params.ebnf"),
    ({"text": "x", "sampling_params": {"json_schema": ""}}, "sampling_params.json_schema is ''",
     "sampling_params.json_schema"),
    ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params is a list of 1; allowed: one for each of the 2",
     "sampling_params"),
    ({"text": ["x", "y"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params differ in n", "sampling_params.n"),
    ({"text": "x", "return_logprob": 1}, "return_logprob is 1; allowed: true or false", "return_logprob"),
    ({"text": "x", "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len is 9; allowed: -1 to 1",
     "logprob_start_len"),
    ({"text": "x", "logprob_start_len": -2}, "logprob_start_len is -2; allowed: at least -1", "logprob_start_len"),
    ({"text": "x", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num is 21; allowed: ",
     "top_logprobs_num"),
    ({"text": "x", "image_data": "http://x/y.png"}, "image_data is not supported by this server", "image_data"),
    ({"text": "x", "lora_path": "a"}, "lora_path is not supported by this server", "lora_path"),
    ({"text": "x", "return_hidden_states": True}, "return_hidden_states is not supported", "return_hidden_states"),
    ({"text": "x", "return_routed_experts": True}, "not recorded by this engine", "return_routed_experts"),
    ({"text": "x", "rid": "a b"}, "rid is 'a b'; allowed: ", "rid"),
    ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid is ['a', 'a']; allowed: another one for each prompt", "rid"),
    ({"text": "x", "sampling_params": {"max_new_tokens": 5000}}, "the context holds 1024 tokens",
     "sampling_params.max_new_tokens"),
    ({"input_ids": [1] * 2000}, "the context holds 1024 tokens", "input_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message", "param"), BAD)
def test_refusals_name_the_field(real, body, message, param):
    error = refusal(real, **body)
    assert message in error["message"]
    assert error["param"] == param


def test_unknown_fields_are_ignored_and_logged_once(http, engine, caplog):
    engine.script = "x"
    for _ in range(2):
        generate(http, text="x", a_hope=1, log_metrics=True, sampling_params={"a_hunch": 1, "stream_interval": 2})
    for name in ("'a_hope'", "'sampling_params.a_hunch'"):
        assert len([record for record in caplog.records if name in record.getMessage()]) == 1
    assert "stream_interval" not in caplog.text


class Asking:
    """A request in a thread of its own, that has begun."""

    def __init__(self, client, engine, path="/generate", **body):
        self.answer = None
        engine.started.clear()
        self._thread = threading.Thread(target=self._ask, args=(client, path, body))
        self._thread.start()
        assert engine.started.wait(SECONDS)

    def _ask(self, client, path, body):
        self.answer = client.post(path, json=body)

    def joined(self):
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.answer.json()


def test_a_request_is_ended_by_its_name_and_answered_with_what_it_has(real, model_server):
    """The whole way: the engine stops computing, and the client gets the tokens that were drawn."""
    body = {"input_ids": IDS, "rid": "long", "stream": True, "return_logprob": True}
    params = {"max_new_tokens": 900, "ignore_eos": True}
    with real.stream("POST", "/generate", json=body | {"sampling_params": params}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        ended = real.post("/abort_request", json={"rid": "long"}).json()
        assert (ended["success"], ended["num_ended"]) == (True, 1)
        *_, last, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    found = json.loads(last.removeprefix("data: "))
    assert found["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(found["output_ids"]) == len(found["meta_info"]["output_token_logprobs"]) < 900
    assert real.post("/abort_request", json={"rid": "long"}).json()["num_ended"] == 0
    for body, got in (({}, "missing"), ({"rid": ""}, "empty")):
        error = real.post("/abort_request", json=body).json()["error"]
        assert error["message"].startswith(f"rid is {got}; allowed: the id of a request")


def test_a_name_that_several_requests_have_ends_all_of_them(real, model_server):
    params = {"max_new_tokens": 900, "ignore_eos": True}
    bodies = [{"input_ids": IDS[: 2 + n], "rid": "same", "stream": True, "sampling_params": params} for n in range(2)]
    with (
        real.stream("POST", "/generate", json=bodies[0]) as one,
        real.stream("POST", "/generate", json=bodies[1]) as other,
    ):
        answers = [one.iter_lines(), other.iter_lines()]
        for lines in answers:
            assert next(lines).startswith("data: ")
        assert real.post("/abort_request", json={"rid": "same"}).json()["num_ended"] == 2
        for number, lines in enumerate(answers):
            *_, last, _done = [line for line in lines if line]
            about = json.loads(last.removeprefix("data: "))["meta_info"]
            assert (about["finish_reason"]["type"], about["prompt_tokens"]) == ("abort", 2 + number)


def test_nobody_ends_what_another_asked_for():
    """By name or all at once, through whatever API it came."""
    engine = scripted("abcdef")
    engine.hangs, ended = True, []
    engine.abort = lambda engine_id: ended.append(engine_id) or 1
    with served(engine, key("alice"), key("bob")) as client:
        alice, bob = (
            httpx.Client(base_url=client.base_url, headers=bearer(name), timeout=20) for name in ("alice", "bob")
        )
        with alice, bob:
            requested = [
                Asking(alice, engine, text=["x", "y"], rid="job"),
                Asking(alice, engine, "/v1/completions", prompt="x", request_id="job"),
                Asking(bob, engine, text="x", rid="job"),
            ]
            assert bob.post("/abort_request", json={"rid": "cmpl-job"}).json()["num_ended"] == 0
            assert bob.post("/abort_request", json={"rid": "alice/job_0"}).json()["num_ended"] == 0
            assert ended == []
            bob.post("/abort_request", json={"rid": "job"})
            assert ended == ["bob/job"]
            ended.clear()
            alice.post("/abort_request", json={"rid": "job"})
            assert sorted(ended) == ["alice/job_0", "alice/job_1"]
            ended.clear()
            assert alice.post("/abort_request", json={"abort_all": True}).json()["num_ended"] == 3
            assert sorted(ended) == ["alice/cmpl-job", "alice/job_0", "alice/job_1"]
            engine.release()
            for one in requested:
                one.joined()
            assert alice.post("/abort_request", json={"abort_all": True}).json()["num_ended"] == 0


def test_experts_are_told_as_trainers_read_them():
    """Base64 of int32 [tokens but the last, all layers, experts a token]."""
    model = random_model(11)
    cfg = model.cfg
    engine = AsyncEngine(LLM(model, tiny_tokenizer(), max_num_seqs=2, enable_return_routed_experts=True))
    with engine, served(engine) as http:
        requested = {"input_ids": IDS, "return_routed_experts": True, "return_prompt_token_ids": True}
        answer = generate(http, **requested, sampling_params=GREEDY)
        reported = answer["meta_info"]["routed_experts"]
        shape = (len(IDS) + 8 - 1, cfg.num_hidden_layers, cfg.num_experts_per_tok)
        experts = np.frombuffer(base64.b64decode(reported), dtype="<i4").reshape(shape)
        sparse = [cfg.is_moe(layer_idx) for layer_idx in range(cfg.num_hidden_layers)]
        assert not experts[:, [not one for one in sparse]].any()
        routed = experts[:, sparse]
        assert routed.min() >= 0
        assert routed.max() < cfg.n_routed_experts
        assert (routed[..., 0] != routed[..., 1]).all()
        assert answer["prompt_token_ids"] == IDS
        later = generate(http, **requested, routed_experts_start_len=len(IDS), sampling_params=GREEDY)["meta_info"]
        part = np.frombuffer(base64.b64decode(later["routed_experts"]), dtype="<i4").reshape(-1, *shape[1:])
        assert (part == experts[len(IDS) :]).all()
        drawn = GREEDY | {"n": 2, "temperature": 1.0}
        for one in generate(http, **requested, sampling_params=drawn):
            each = np.frombuffer(base64.b64decode(one["meta_info"]["routed_experts"]), dtype="<i4").reshape(shape)
            assert (each[: len(IDS) - 1] == experts[: len(IDS) - 1]).all()
            assert each[:, sparse].min() >= 0


def test_a_rollout_reads_tokens_log_probabilities_and_ending(real):
    """The request of a rollout of slime, and what it takes from the answer, turn after turn."""
    sampling = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "stop": None, "stop_token_ids": None,
        "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
    }  # fmt: skip
    tokens, logprobs, versions = list(IDS), [], []
    for turn in range(2):
        body = {"rid": f"turn-{turn}", "input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
        headers = {"X-SMG-Routing-Key": "session"}
        output = real.post("/generate", json=body, headers=headers).json()
        meta = output["meta_info"]
        new = [item[1] for item in meta["output_token_logprobs"]]
        assert output["output_ids"] == new
        assert TOKENIZER.decode(new) == output["text"]
        assert len(new) == meta["completion_tokens"]
        assert meta["finish_reason"]["type"] in ("stop", "length")
        assert meta["prompt_tokens"] == len(tokens)
        logprobs += [item[0] for item in meta["output_token_logprobs"]]
        versions.append(meta["weight_version"])
        tokens += new
    assert versions == ["0", "0"]
    # What was drawn at temperature 1 is what a prompt of it scores.
    scored = generate(
        real, input_ids=tokens, return_logprob=True, logprob_start_len=0, sampling_params={"max_new_tokens": 0}
    )["meta_info"]["input_token_logprobs"]
    assert [item[0] for item in scored[len(IDS) :]] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("name", ["text", "input_ids"])
def test_its_load_generator(real, streams, name):
    """Body and reading of `python -m sglang.bench_serving --backend sglang`: line by line, cumulative text."""
    body = {
        name: TEXT if name == "text" else IDS,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True},
        "stream": streams, "lora_path": "", "return_logprob": False, "logprob_start_len": -1,
    }  # fmt: skip
    text, length, new_tokens = "", 12, []
    answer = real.post("/generate", json=body, headers={"user-agent": "Python/3.12 aiohttp/3.12"})
    assert answer.status_code == 200
    for line in answer.content.splitlines():
        if not (line := line.strip()):
            continue
        data = line.decode().removeprefix("data: ")
        if data == "[DONE]":
            continue
        found = json.loads(data)
        if found.get("text"):
            new_tokens.append(found["meta_info"]["completion_tokens"] - sum(new_tokens))
            text, length = found["text"], found["meta_info"]["completion_tokens"]
    assert text
    assert length == sum(new_tokens) == 12
    assert all(count > 0 for count in new_tokens)


def test_what_evaluation_scripts_send(real):
    """SGLang's front end: few tokens of raw text, with stop strings; and what it asks for first."""
    assert real.get("/get_model_info").json()["is_generation"] is True
    stops = ["Question", "Assistant:", "<|separator|>"]
    answer = generate(real, text=TEXT, sampling_params={"temperature": 0, "max_new_tokens": 16, "stop": stops})
    assert answer["meta_info"]["completion_tokens"] <= 16


def test_what_is_served_and_how(http, engine):
    for path in ("/get_model_info", "/model_info"):
        info = http.get(path).json()
        assert (info["model_path"], info["weight_version"], info["model_type"]) == ("org/tiny", "4", "glm_moe_dsa")
    assert http.get("/get_weight_version").json() == {"weight_version": "4"}
    for path in ("/get_server_info", "/server_info"):
        info = http.get(path).json()
        state = info["internal_states"][0]
        assert state["avg_spec_accept_length"] == 1 + (90 + 40) / 100
        assert (state["num_running_reqs"], state["num_waiting_reqs"], state["token_usage"]) == (3, 3, 0.25)
        assert (info["tp_size"], info["resolved"], info["chat_template"]) == (1, {"dtype": "float32"}, "glm-5.1")
    engine.refuses = EngineDead("it died")
    assert http.get("/get_server_info").json()["internal_states"] == [{"avg_spec_accept_length": None}]
    assert http.get("/get_weight_version").json() == {"weight_version": None}
