"""Prompts as tokens and tokens as text, in vLLM's shapes."""

import pytest

from tests.support.tokenizers import tiny_tokenizer
from tests.unit.serve.asking import ASK
from tests.unit.serve.test_errors import error_of

TOKENIZER = tiny_tokenizer()


def tokenize(http, **body):
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_text(http):
    ids = TOKENIZER.encode("the answer<|user|>")
    answer = tokenize(http, model="tiny", prompt="the answer<|user|>", add_special_tokens=True)
    assert answer == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    names = tokenize(http, prompt="the answer<|user|>", return_token_strs=True)["token_strs"]
    assert ("".join(names), names[-1]) == ("the answer<|user|>", "<|user|>")
    assert tokenize(http, prompt="")["tokens"] == []


def test_conversations_are_what_a_chat_request_makes_of_them(http, engine):
    engine.script = "</think>x"
    tool = {"type": "function", "function": {"name": "f"}}
    for fields in (
        {},
        {"tools": [tool]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"messages": [*ASK, {"role": "assistant", "content": "Ber"}], "continue_final_message": True},
    ):
        answer = tokenize(http, **{"messages": ASK, **fields})
        http.post("/v1/chat/completions", json={"messages": ASK, **fields}).raise_for_status()
        assert answer["tokens"] == engine.prompt_ids


def test_back_to_text(http):
    ids = TOKENIZER.encode("<|user|>the answer \u00fc")
    answer = http.post("/detokenize", json={"model": "tiny", "tokens": ids})
    assert answer.json() == {"prompt": "<|user|>the answer \u00fc"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("tokenize", {}, "prompt"), ("tokenize", {"prompt": "x", "messages": ASK}, "prompt"),
     ("tokenize", {"prompt": 5}, "prompt"), ("tokenize", {"messages": [{"role": "judge"}]}, "messages[0].role"),
     ("detokenize", {}, "tokens"), ("detokenize", {"tokens": "x"}, "tokens"),
     ("detokenize", {"tokens": [-1]}, "tokens.0"), ("detokenize", {"tokens": [1.5]}, "tokens.0")],
)  # fmt: skip
def test_bad_requests(http, path, body, param):
    answer = http.post(f"/{path}", json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_another_model(http):
    answer = http.post("/tokenize", json={"model": "gpt-5", "prompt": "x"})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


def test_models_by_name(http):
    cards = http.get("/v1/models").json()["data"]
    assert [http.get(f"/v1/models/{card['id']}").json() for card in cards] == cards
    answer = http.get("/v1/models/org/other")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")
    assert "'org/other' does not exist; allowed: tiny, alias" in error_of(answer)["message"]
