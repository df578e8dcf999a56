"""Bad values are refused by name, good ones pass; words become tokens as vLLM spells them."""

import math
import re
from dataclasses import fields, replace
from enum import IntEnum
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from glm5.common.errors import RequestError
from glm5.engine.sampling import SamplingParams, StructuredOutputsParams
from glm5.engine.sampling.params import MAX_BAD_WORD_LEN, NUMBERS, answer_seeds
from glm5.engine.sampling.words import bad_word_ids
from tests.support.tokenizers import tiny_tokenizer


class Rank(IntEnum):
    TEN = 10


NAN, INF = float("nan"), float("inf")
BAD = [
    ("n", [0, -1, 1.0, True, 129, "2"]),
    ("presence_penalty", [2.1, -2.1, NAN, None, "1", True]),
    ("frequency_penalty", [3, -INF, [1]]),
    ("repetition_penalty", [0, -1, 101, NAN]),
    ("temperature", [-0.1, 101, NAN, INF, None]),
    ("top_p", [0, 1.1, -1, NAN]),
    ("top_k", [-2, 1.5, 2**31, True]),
    ("min_p", [-0.1, 1.1]),
    ("seed", [2**64, -(2**63) - 1, 1.0]),
    ("stop", [[""], "", [1], ["x"] * 65, 5, {}, {"x": 1}, "\ud800"]),
    ("stop_token_ids", [[-1], ["1"], [1.0], list(range(129)), 3, {}, {3: 1}]),
    ("bad_words", [[""], [1], ["x"] * 129, 5, {}, {"x": 1}]),
    ("max_tokens", [0, -1, 1.5, "9", [], 1j]),
    ("min_tokens", [-1, 17, 1.0]),
    ("logprobs", [-1, True]),
    ("prompt_logprobs", [-1, 1.0]),
    ("ignore_eos", [None, 1]),
    ("logit_bias", [{-1: 1}, {"a": 1}, {1: "x"}, {1: NAN}, [1], {1.5: 1}, dict.fromkeys(range(1025), 1)]),
    ("allowed_token_ids", [[], [-1], ["1"], 5, {}, {1: 2}]),
    ("structured_outputs", [{}, "x", {"json": {}}]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)
    assert "allowed" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_within_their_bounds(name):
    """Of every declared number, which needs no line of its own here."""
    bounds = NUMBERS[name].bounds
    assert getattr(SamplingParams(), name) == NUMBERS[name].default
    beyond = [bounds.minimum - 1, bounds.maximum + 1, NAN, "1", True, [1]]
    for value in beyond if math.isfinite(bounds.maximum) else beyond[:1] + beyond[2:]:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


def test_the_document_has_every_field():
    document = (Path(__file__).parents[4] / "docs/engine.md").read_text(encoding="utf-8")
    table = document.partition("## What a request may ask")[2].partition("\n## ")[0]
    first_column = " ".join(re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE))
    assert sorted(re.findall(r"`(\w+)`", first_column)) == sorted(field.name for field in fields(SamplingParams))


def test_several_greedy_answers_are_refused():
    with pytest.raises(RequestError, match="n is 2"):
        SamplingParams(n=2, temperature=0)


def test_values_are_made_uniform():
    params = SamplingParams(stop="a", stop_token_ids=[3], logit_bias={"7": 300, 8: -500.0}, bad_words=["x"])
    assert params.stop == ("a",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {7: 100.0, 8: -100.0}
    assert params.but(top_k=4).logit_bias == params.logit_bias


def test_numbers_and_texts_of_other_classes_become_pythons():
    class Text(str):
        pass

    params = SamplingParams(temperature=np.float64(0.5), top_k=Rank.TEN, stop=[Text("a")], stop_token_ids=[Rank.TEN])
    assert [type(value) for value in (params.temperature, params.top_k, params.stop[0])] == [float, int, str]
    assert type(params.stop_token_ids[0]) is int
    assert params == msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)


@pytest.mark.parametrize(
    "requested", [{"json": {1: 2**70}}, {"choice": ["a", "b"]}, {"json_object": True}, {"regex": "a"}]
)
def test_constraints_can_be_sent_plain(requested):
    wanted = StructuredOutputsParams(**requested, disable_any_whitespace=True)
    plain = wanted.plain()
    assert (plain.kind, plain.text, plain.disable_any_whitespace) == (wanted.kind, wanted.text, True)
    assert plain == msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=StructuredOutputsParams)


def test_token_ids_must_be_the_models():
    for changes in ({"stop_token_ids": [9]}, {"logit_bias": {9: 1}}, {"allowed_token_ids": [1, 9]}):
        params = SamplingParams(**changes)
        params.check_token_ids(10)
        with pytest.raises(RequestError, match=f"{next(iter(changes))} holds 9.*below the vocabulary's 9"):
            params.check_token_ids(9)


def test_each_of_n_sequences_has_its_own_seed():
    seeds = [one.seed for one in SamplingParams(n=3, seed=2**64 - 2).sequences()]
    assert seeds == answer_seeds(2**64 - 2, 3)
    assert seeds[0] == 2**64 - 2
    assert [one.seed for one in SamplingParams(n=2).sequences()] == [None, None]
    assert {one.n for one in SamplingParams(n=3).sequences()} == {1}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": ""},
        {"json": 5},
        {"json": {"a": {1}}},
        {"regex": ""},
        {"choice": []},
        {"choice": "abc"},
        {"choice": ["a", ""]},
        {"grammar": 3},
        {"json_object": "yes"},
        {"regex": "a", "disable_any_whitespace": 1},
    ],
    ids=str,
)
def test_bad_constraints_are_refused(fields):
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == "structured_outputs"


def test_bad_words_as_tokens():
    """`in` has two spellings: ' in' is one token too. ' Zz' is two, as 'Zz' is, and begins with another token."""
    tokenizer = tiny_tokenizer()
    words = bad_word_ids(["the", " the", "Zz"], tokenizer.encode)
    texts = [tokenizer.decode(word) for word in words]
    assert texts[:2] == ["the", " the"] or texts[0] == "the"
    assert len(set(words)) == len(words)
    for word in words:
        assert tokenizer.decode(word).strip() in ("the", "Zz")
    with pytest.raises(RequestError, match=f"is {MAX_BAD_WORD_LEN + 8} tokens"):
        bad_word_ids(["Q" * (MAX_BAD_WORD_LEN + 8)], tokenizer.encode)
    with pytest.raises(RequestError, match="is 0 tokens"):
        bad_word_ids([" "], lambda text: [])


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2**63, "max_tokens": 7},
        {"n": 3},
        {"temperature": np.float32(0.5), "top_k": 4},
        {"seed": None, "max_tokens": None},
        {"seed": 1.5},
        {"max_tokens": 0},
        {"min_tokens": 17},
        {"top_p": 0.0},
        {"temperature": 0.0, "n": 2},
        {"truncate_prompt_tokens": 0},
    ],
)
def test_changed_numbers_are_checked_as_new_ones(changes):
    """`but` checks what numbers can break, and nothing else."""
    given = SamplingParams(stop=["a"], logit_bias={3: 1.0}, output_kind="DELTA")
    results = []
    for change in (given.but, partial(replace, given)):
        try:
            results.append(change(**changes))
        except RequestError as error:
            results.append((str(error), error.param))
    assert results[0] == results[1]
