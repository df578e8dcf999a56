"""Each bad request with its status, its message, the field and the code."""

import json

import httpx
import pytest

from glm5.chat.template import ChatTemplate
from glm5.common.errors import EngineDead, MissingExtra
from glm5.serve.app import create_app
from glm5.serve.chat.body import ChatBody
from glm5.serve.http.server import bind, serving
from tests.unit.serve.conftest import CONFIG

ASK = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather"}}
UNENFORCED = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"days": {"type": "array", "uniqueItems": True}}},
    },
}


def post(http, body, **options):
    return http.post("/v1/chat/completions", json=body, **options)


def error_of(answer) -> dict:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if answer.status_code < 500 else "server_error")
    return error


# fields of the body, message, param
BAD = [
    ({"messages": ...}, "messages is missing", "messages"),
    ({"messages": "hi"}, "messages is 'hi'; allowed: ", "messages"),
    ({"messages": []}, "messages ", "messages"),
    ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role is 'judge'", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content ", "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only",
     "messages[0].content"),
    ({"temperature": -1}, "temperature is -1.0; allowed: 0 (greedy) to 100", "temperature"),
    ({"temperature": "hot"}, "temperature is 'hot'; allowed: ", "temperature"),
    ({"top_p": 0}, "top_p is 0.0; allowed: above 0, at most 1", "top_p"),
    ({"top_k": -5}, "top_k is -5; allowed: -1 or 0 (all), or 1 to ", "top_k"),
    ({"min_p": 1.5}, "min_p is 1.5; allowed: 0 to 1", "min_p"),
    ({"seed": 2**70}, "seed is ", "seed"),
    ({"stop": 5}, "stop is 5; allowed: a non-empty text, or up to 64 of them", "stop"),
    ({"stop": [""]}, "stop is ['']; allowed: ", "stop"),
    ({"stop": ["x"] * 65}, "allowed: a non-empty text, or up to 64 of them", "stop"),
    ({"stop": ["x" * 4097]}, "allowed: texts of up to 4096 characters", "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids is ['a']; allowed: a list of up to 128 token ids", "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens is 0; allowed: at least 1", "max_tokens"),
    ({"max_completion_tokens": -3}, "max_completion_tokens is -3; allowed: at least 1", "max_completion_tokens"),
    ({"max_tokens": 1.5}, "max_tokens is 1.5; allowed: an integer", "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens is 6; allowed: 0 to max_tokens (5)", "min_tokens"),
    ({"n": 2, "temperature": 0}, "n is 2; allowed: 1 with temperature 0", "n"),
    ({"n": 0}, "n is 0; allowed: 1 to 128", "n"),
    ({"n": True}, "n is true; allowed: an integer", "n"),
    ({"logprobs": 3}, "logprobs is 3; allowed: true or false", "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs is 3; allowed: only with logprobs true", "top_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs is -1; allowed: ", "prompt_logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias is {'a': 1}; allowed: a mapping of token ids to numbers", "logit_bias"),
    ({"frequency_penalty": 3}, "frequency_penalty is 3.0; allowed: -2 to 2", "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0.0; allowed: 0.01 to 100", "repetition_penalty"),
    ({"bad_words": [""]}, "bad_words is ['']; allowed: ", "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids is []; allowed: some token ids", "allowed_token_ids"),
    ({"allowed_token_ids": [5] * (2**18 + 1)}, "allowed: some token ids, up to 262144", "allowed_token_ids"),
    ({"thinking_token_budget": -1}, "thinking_token_budget is -1; allowed: ", "thinking_token_budget"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens is -1; allowed: ",
     "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1}, "thinking_token_budget": 2}, "say it once",
     "thinking_token_budget"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type is 'sometimes'; allowed: ", "thinking.type"),
    ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "thinking and reasoning_effort contradict",
     "reasoning_effort"),
    ({"reasoning_effort": "huge"}, "reasoning_effort is 'huge'; allowed: none, minimal, low", "reasoning_effort"),
    ({"priority": 1.5}, "priority is 1.5; allowed: an integer", "priority"),
    ({"request_id": "a b"}, "request_id is 'a b'; allowed: ", "request_id"),
    ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'; allowed: text, json_object, json_schema",
     "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema is missing", "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "both say what the answer must look like",
     "response_format"),
    ({"structured_outputs": {}}, "structured_outputs has no constraint; allowed: exactly one", "structured_outputs"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml is not known; allowed: json, ", "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern is not supported",
     "structured_outputs"),
    ({"guided_choice": []}, "guided_choice is []; allowed: a list of non-empty texts", "guided_choice"),
    ({"tool_choice": "required"}, "tool_choice requires a call, but there are no tools", "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice is 'always'; allowed: auto, none, required, ", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice requires a call", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [TOOL]},
     "tool_choice names 'f', which is not one of the tools", "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3]}}},
     "tool_choice.allowed_tools.tools holds 3", "tool_choice"),
    ({"continue_final_message": True}, "needs a last message of the assistant", "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other", "continue_final_message"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options are for streams", "stream_options"),
    ({"tools": {}}, "tools is {}; allowed: ", "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name ",
     "tools[0].function.name"),
    ({"tools": [UNENFORCED]}, "/uniqueItems cannot be enforced", "tools"),
    ({"top_k": True}, "top_k is true; allowed: ", "top_k"),
    ({"stop": [None]}, "stop is [null]; allowed: ", "stop"),
    ({"stop": [None, "None"]}, "stop is [null, 'None']; allowed: ", "stop"),
    ({"request_id": "a b"}, "request_id is 'a b'; allowed: 1 to 128 visible ASCII characters, so no", "request_id"),
    ({"request_id": "a" * 129}, "allowed: 1 to 128 visible ASCII characters, so no spaces", "request_id"),
    ({"stream": "yes"}, "stream is 'yes'; allowed: ", "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage is 1; allowed: ",
     "stream_options.include_usage"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "enable_thinking", "enable_thinking"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages is not for chat_template_kwargs",
     "chat_template_kwargs.messages"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message", "param"), BAD, ids=lambda value: json.dumps(value, default=str)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_400_by_name(http, fields, message, param, stream):
    body = {"messages": ASK, "stream": stream} | fields
    answer = post(http, {name: value for name, value in body.items() if value is not ...})
    assert answer.status_code == 400
    error = error_of(answer)
    assert message in error["message"]
    assert error["param"] == param


# what is known and not supported, with a value that changes nothing, if there is one
REFUSED = {
    "functions": [], "function_call": "auto", "modalities": ["audio"], "audio": {}, "prediction": {}, "store": True,
    "verbosity": "low", "web_search_options": {}, "documents": [{}], "chat_template": "x",
    "mm_processor_kwargs": {"a": 1}, "echo": True, "separate_reasoning": False,
    "stream_reasoning": False, "use_beam_search": True, "length_penalty": 2,
    "early_stopping": True, "truncate_prompt_tokens": 5, "prompt_embeds": "x", "logits_processors": ["x"],
    "custom_logit_processor": "x", "custom_params": {}, "guided_whitespace_pattern": " ", "kv_transfer_params": {},
    "vllm_xargs": {}, "lora_path": "x", "session_params": {}, "return_hidden_states": True, "service_tier": "flex",
    "no_stop_trim": True, "best_of": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(http, name):
    assert REFUSED.keys() == ChatBody.refused.keys()
    answer = post(http, {"messages": ASK, name: REFUSED[name]})
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported by this server: leave it out")


def test_neutral_values_of_what_is_not_supported_are_fine(http, engine):
    engine.script = "</think>x"
    neutral = {name: values[0] for name, values in ChatBody.refused.items() if values}
    assert post(http, {"messages": ASK, "length_penalty": 1} | neutral).status_code == 200
    assert post(http, {"messages": ASK} | dict.fromkeys(ChatBody.model_fields.keys() - {"messages"})).status_code == 200
    answer = post(http, {"messages": ASK, "echo": 0})
    assert answer.json()["error"]["message"] == "echo is not supported by this server: leave it out; allowed: false"


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "the body is not JSON"), (b"[1]", "expected an object"), (b"\xff", "the body is not JSON"),
     (b"[" * 100_000, "the body is nested more than 128 deep"), (b'{"a": NaN}', "NaN is not JSON"),
     (b'{"a": %b}' % (b"9" * 5000), "the body has an integer of more than 4300 digits"),
     (b'{"a":' * 129 + b"1" + b"}" * 129, "the body is nested more than 128 deep")],
    ids=["cut off", "a list", "not UTF-8", "far too deep", "no number", "a long number", "too deep"],
)  # fmt: skip
def test_bodies_that_are_no_object(http, content, message):
    answer = http.post("/v1/chat/completions", content=content, headers=JSON)
    assert answer.status_code == 400
    assert message in error_of(answer)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_bodies_of_another_type(http, kind):
    answer = http.post("/v1/chat/completions", content=b'{"messages": []}', headers={"content-type": kind})
    assert answer.status_code == 415
    assert error_of(answer)["message"] == f"content-type is {kind!r}; allowed: application/json"


def test_the_model_must_be_one_of_the_served_names(http, engine):
    engine.script = "x"
    answer = post(http, {"model": "gpt-5", "messages": ASK})
    assert answer.status_code == 404
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "the model 'gpt-5' does not exist; allowed: tiny, alias"
    assert post(http, {"model": "alias", "messages": ASK}).json()["model"] == "alias"


def test_prompt_and_answer_must_fit_the_context(http, engine):
    answer = post(http, {"messages": ASK, "max_tokens": engine.max_model_len})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    assert "the context holds 512 tokens" in error["message"]
    assert f"max_tokens is {engine.max_model_len}" in error["message"]
    answer = post(http, {"messages": [{"role": "user", "content": "x" * 600}]})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "the prompt has 6" in error["message"]


@pytest.fixture
def small(engine):
    """A server that takes no more than 1000 bytes."""
    template = ChatTemplate.bundled("glm-5.1", engine.tokenizer)
    app = create_app(engine, template, engine.tokenizer, CONFIG.model_copy(update={"max_body_bytes": 1000}))
    with serving(app, engine, bind("127.0.0.1", 0)) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("known_length", [True, False])
def test_a_body_too_large(small, known_length):
    http = small
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}).encode()
    content = body if known_length else iter([body[:500], body[500:]])
    answer = http.post("/v1/chat/completions", content=content, headers=JSON)
    assert answer.status_code == 413
    error = error_of(answer)
    assert error["code"] == "request_too_large"
    assert error["message"] == "the body is larger than 1000 bytes"


def test_a_long_conversation_is_not_too_large(http):
    """More than a megabyte arrives whole; what does not fit is the prompt, not the body."""
    answer = post(http, {"messages": [{"role": "user", "content": "word " * 210_000}]})
    assert error_of(answer)["code"] == "context_length_exceeded"


def test_what_cannot_fit_is_refused_without_encoding_it(http, engine, monkeypatch):
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *_: pytest.fail("encoded"))
    answer = post(http, {"messages": [{"role": "user", "content": "word " * 210_000}]})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "the context holds 512 tokens, prompt and answer together; the prompt has at least " in error["message"]


def test_half_a_character_in_a_conversation(http):
    body = json.dumps({"messages": [{"role": "user", "content": "\ud83d"}]})
    answer = http.post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["message"].split(" '")[0], error["param"]) == ("the text holds an unpaired surrogate", "messages")


def test_any_name_may_be_a_templates_own(http, engine):
    engine.script = "</think>x"
    assert post(http, {"messages": ASK, "chat_template_kwargs": {"self": 1, "name": 2, "prompt": 3}}).status_code == 200


def test_errors_stay_short(http):
    for fields in ({"model": "x" * 100_000}, {"stop": ["x" * 1000] * 100}, {"stop_token_ids": ["x"] * 100_000}):
        assert len(error_of(post(http, {"messages": ASK} | fields))["message"]) < 500


def test_what_this_server_has_not_is_refused_by_its_name(http):
    paths = {
        "/v1/embeddings": "embeddings", "/v1/moderations": "moderations", "/v1/images/generations": "images",
        "/v1/files": "files", "/v1/files/file-1/content": "files", "/v1/batches": "batches",
        "/v1/messages/batches": "batches",
    }  # fmt: skip
    for path, what in paths.items():
        for answer in (http.get(path), http.post(path, content=b"any"), http.delete(path)):
            assert answer.status_code == 404
            assert f"this server has no {what}," in answer.json()["error"]["message"]
    assert http.get("/v1/messages/batches").json()["error"]["details"] == {"error_code": "not_served"}
    assert error_of(http.get("/v1/files"))["code"] == "not_served"


def test_head_answers_as_get_without_a_body(http):
    for path in ("/", "/health", "/v1/models", "/metrics", "/openapi.json", "/get_model_info", "/v1/nothing"):
        head, get = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        for name in ("content-type", "content-length"):
            assert path == "/metrics" or head.headers.get(name) == get.headers.get(name), path
    assert http.head("/v1/chat/completions").status_code == 405


def test_unknown_paths_and_methods(http):
    answer = http.get("/v1/nothing")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
    answer = http.get("/v1/chat/completions")
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("stream", [False, True])
def test_bugs_are_not_told(scripted_server, engine, caplog, stream):
    engine.script, engine.fails = "ab", RuntimeError("secret")
    answer = httpx.post(scripted_server[0] + "/v1/chat/completions", json={"messages": ASK, "stream": stream})
    assert answer.status_code == (200 if stream else 500)  # a stream has begun, and can only end with the error
    reported = answer.text.split("\n\n")[-3].removeprefix("data: ") if stream else answer.text
    assert json.loads(reported)["error"]["message"] == "internal error; the server's log has the details"
    assert "secret" not in answer.text
    assert not stream or "secret" in caplog.text  # uvicorn logs the other after it has answered


def test_an_engine_that_died(http, engine, monkeypatch):
    def check(*_, **__):
        raise EngineDead("MemoryError: no room")

    monkeypatch.setattr(engine, "check", check)
    for stream in (False, True):
        answer = post(http, {"messages": ASK, "stream": stream})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_stopped")
        assert "MemoryError: no room" in error_of(answer)["message"]


def test_what_needs_a_package_that_is_not_there(http, engine, monkeypatch):
    def check(*_, **__):
        raise MissingExtra("structured_outputs need the package 'xgrammar': run  pip install 'glm5[grammar]'")

    monkeypatch.setattr(engine, "check", check)
    answer = post(http, {"messages": ASK, "guided_regex": "a"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "not_installed")
    assert "pip install 'glm5[grammar]'" in error_of(answer)["message"]


def test_health(http, engine):
    assert http.get("/health").status_code == 200
    engine.stopped_because = "it was not started"
    answer = http.get("/health")
    assert answer.status_code == 503
    assert error_of(answer)["message"] == "the engine is not running: it was not started"


def test_models(http, engine):
    cards = http.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["tiny", "alias"]
    assert {(card["object"], card["root"], card["max_model_len"]) for card in cards["data"]} == {
        ("model", "org/tiny", 512)
    }


def test_no_other_origin_is_let_in(http, engine):
    engine.script = "x"
    answer = post(http, {"messages": ASK}, headers={"origin": "https://elsewhere.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


LONG = "n" * 100_000
SCHEMA = {"type": "object", "properties": {LONG: {"type": "string", "pattern": LONG}}, "required": [LONG, LONG + "x"]}
ECHOES = [
    {"model": LONG},
    {"bad_words": [LONG]},
    {"logit_bias": {LONG: 1}},
    {"chat_template_kwargs": {"enable_thinking": LONG}},
    {"chat_template_kwargs": {"reasoning_effort": [LONG]}},
    {"stream_options": {LONG: LONG}, "stream": LONG},
    {"tool_choice": {"type": "function", "function": {"name": LONG}}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]},
    {"tools": [{"type": LONG, "function": {"name": LONG, LONG: LONG}}]},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": {"$ref": LONG}}},
    {"structured_outputs": {"json": {"$ref": "#/" + LONG}}},
    {"structured_outputs": {"json": {"type": "string", "format": LONG}}},
    {"structured_outputs": {"grammar": LONG}},
    {"structured_outputs": {LONG: LONG}},
    {"response_format": {"type": LONG}},
    {"messages": [{"role": LONG, "content": LONG}]},
    {"messages": [*ASK, {"role": "tool", "tool_call_id": LONG, "content": LONG}]},
]


@pytest.mark.parametrize("number", range(len(ECHOES)))
def test_a_refusal_does_not_send_a_long_value_back(http, number):
    answer = post(http, {"messages": ASK, "tool_choice": "auto", **ECHOES[number]})
    assert answer.status_code in (200, 400, 404)
    assert answer.status_code == 200 or len(answer.text) < 1500
