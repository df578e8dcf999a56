"""Every sampling parameter by its visible effect on a model's answers, over HTTP."""

from collections import Counter

import httpx
import pytest

from tests.support.tokenizers import tiny_tokenizer
from tests.unit.serve.asking import ASK, RequestBuilder, text_of

TOKENIZER = tiny_tokenizer()
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def asker(model_server):
    with httpx.Client(base_url=model_server[0], timeout=60) as http:
        yield RequestBuilder(http, "/v1/completions", prompt="the answer is")


def ids(asker, **fields):
    return asker.answer(return_token_ids=True, **{**GREEDY, **fields})["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def greedy(asker):
    """What the model likes best."""
    return ids(asker)


def test_several_answers(asker):
    fields = {"n": 3, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    answer = asker.answer(**fields)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 24
    chunks = asker.chunks(**fields)
    for index in range(3):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == texts[index]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_a_seed_repeats_and_another_does_not(asker):
    texts = [asker.text(seed=seed, max_tokens=12) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-6}])
def test_what_leaves_one_token_is_greedy(asker, greedy, fields):
    fields = {"temperature": 1.0, "seed": 3} | fields
    assert ids(asker, **fields) == greedy
    assert ids(asker, temperature=1.0, seed=3) != greedy


def test_penalties_make_tokens_rarer(asker):
    """Under a bias for few tokens the model repeats itself; each penalty has it repeat less."""
    few = TOKENIZER.encode("abcdefgh")
    fields = {"allowed_token_ids": few, "temperature": 0, "max_tokens": 40, "ignore_eos": True}

    def most(**more):
        return Counter(ids(asker, **fields, **more)).most_common(1)[0][1]

    free = most()
    assert free > 10
    for more in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 5}):
        assert most(**more) < free, more


def test_logit_bias(asker, greedy):
    wanted = TOKENIZER.encode("Z")[0]
    assert ids(asker, logit_bias={str(wanted): 100}) == [wanted] * 24
    assert greedy[0] not in ids(asker, logit_bias={str(greedy[0]): -100})


def test_bad_words(asker):
    letters = TOKENIZER.encode("abc")
    fields = {"allowed_token_ids": letters, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    text = asker.text(**fields)
    word = text[:2]
    assert word in text
    assert word not in asker.text(**fields, bad_words=[word])


def test_allowed_token_ids(asker):
    letters = TOKENIZER.encode("xyz")
    assert set(ids(asker, allowed_token_ids=letters)) <= set(letters)


def test_stops_and_their_reasons(asker, greedy):
    text = TOKENIZER.decode(greedy)
    stop = text[5:7]
    choice = asker.answer(**GREEDY, stop=stop)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[: text.index(stop)], "stop", stop)
    kept = asker.text(**GREEDY, stop=[stop], include_stop_str_in_output=True)
    assert kept == text[: text.index(stop)] + stop
    choice = asker.answer(**GREEDY, stop_token_ids=[greedy[6]])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", greedy[6])
    assert len(choice["text"]) <= len(text)
    late = ids(asker, stop_token_ids=[greedy[6]], min_tokens=greedy.index(greedy[6]) + 5)
    assert len(late) >= greedy.index(greedy[6]) + 5
    assert asker.answer(**GREEDY)["choices"][0]["stop_reason"] is None


def test_the_end_token_ends_unless_ignored(asker):
    eos = TOKENIZER.eos_ids[0]
    biased = {"logit_bias": {str(eos): 100}, "temperature": 0, "max_tokens": 5}
    choice = asker.answer(**biased, return_token_ids=True)["choices"][0]
    assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == ([eos], "", "stop")
    assert ids(asker, **biased) == [eos] * 5


def test_special_tokens_are_shown_on_request(asker):
    """The end token is no special token here when it is ignored: it is one that the model happened to write."""
    token = TOKENIZER.id_of("[gMASK]")
    biased = {"logit_bias": {str(token): 100}, "temperature": 0, "max_tokens": 2}
    assert asker.text(**biased) == ""
    assert asker.text(**biased, skip_special_tokens=False) == "[gMASK][gMASK]"


def test_salts_keep_caches_apart(asker):
    prompt = "the weather in Paris is fine, " * 20

    def cached(**fields):
        return asker.answer(prompt=prompt, max_tokens=1, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") >= 64
    assert cached(cache_salt="b") == 0


def test_an_urgent_request_goes_first(model_server):
    """The server has 4 seats, all taken; of those that wait, the most urgent is answered first."""
    url, _ = model_server
    with httpx.Client(base_url=url, timeout=60) as http:
        answer = RequestBuilder(http, messages=ASK).answer(priority=-5, max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1


def test_a_budget_of_thinking(model_server):
    with httpx.Client(base_url=model_server[0], timeout=60) as http:
        chat = RequestBuilder(http, messages=ASK, temperature=0, max_tokens=30, ignore_eos=True)
        free = chat.answer()["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert free == 30
        for fields in (
            {"thinking_token_budget": 7},
            {"thinking": {"type": "enabled", "budget_tokens": 7}},
        ):
            answer = chat.answer(**fields, return_token_ids=True)
            choice, usage = answer["choices"][0], answer["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] == 7
            assert choice["token_ids"][7] == TOKENIZER.id_of("</think>")
            assert choice["message"]["reasoning"] == TOKENIZER.decode(choice["token_ids"][:7])
            assert choice["message"]["content"]
            assert usage["completion_tokens"] == 30
        assert chat.answer(thinking_token_budget=0)["choices"][0]["message"]["reasoning"] is None


def test_defaults_of_the_two_apis(asker, model_server):
    assert asker.answer(ignore_eos=True)["usage"]["completion_tokens"] == 16
    with httpx.Client(base_url=model_server[0], timeout=60) as http:
        chat = RequestBuilder(http, messages=ASK)
        assert text_of(chat.answer(max_tokens=3)["choices"][0]) is not None
