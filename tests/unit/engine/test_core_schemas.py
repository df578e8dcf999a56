"""Answers to JSON schemas through the whole engine: every one is valid, and drafts change none of them.

`make test` asks 20 random schemas, `make soak` 200. The model is random, so what it says is its grammar's and chance's;
what ends strings, arrays and objects is made likely, and white space is not, or it would hardly come to an end.
"""

import json
import random
from typing import Any

import jsonschema
import pytest

from glm5.config.presets import preset
from glm5.engine.sampling.params import SamplingParams, StructuredOutputsParams
from tests.support.models import random_model
from tests.support.real_core import RealCore, Request
from tests.support.tokenizers import tiny_tokenizer
from tests.unit.engine.sampling.schemas import SchemaMaker

pytest.importorskip("xgrammar")

TOKENIZER = tiny_tokenizer()
BIASES = dict.fromkeys('"}]', 2.0) | dict.fromkeys(" \n\r\t", -4.0)
LOGIT_BIAS = {TOKENIZER.encode(char)[0]: bias for char, bias in BIASES.items()} | {TOKENIZER.eos_ids[0]: 9.0}
MAX_TOKENS = 900
COUNTS = [20, pytest.param(200, marks=pytest.mark.long)]


def request_of(schema: dict[str, Any], seed: int) -> Request:
    params = SamplingParams(
        max_tokens=None,
        temperature=1.0 if seed % 4 else 0.0,
        logit_bias=LOGIT_BIAS,
        structured_outputs=StructuredOutputsParams(json=schema),
    )
    return Request(TOKENIZER.encode("the answer is"), params, seed, MAX_TOKENS, TOKENIZER.eos_ids)


@pytest.mark.parametrize("num_schemas", COUNTS)
def test_every_answer_is_valid(num_schemas, seed):
    model = random_model(11, preset("tiny").replace(eos_token_id=TOKENIZER.eos_ids))
    maker = SchemaMaker(random.Random(seed))
    schemas = [maker.schema() for _ in range(num_schemas)]
    requests = [request_of(schema, number) for number, schema in enumerate(schemas)]
    texts: list[list[str]] = []
    for depth in (0, 3):
        settings = {"deterministic": True, "max_model_len": 1000, "num_speculative_tokens": depth}
        with RealCore(model, tokenizer=TOKENIZER, **settings) as engine:
            outcomes = engine.answer(requests)
            pace = engine.tokens_per_step
        assert [outcome.reason for outcome in outcomes] == ["stop"] * num_schemas
        texts.append([TOKENIZER.decode(outcome.token_ids[:-1]) for outcome in outcomes])
        checkers = [jsonschema.Draft202012Validator(schema) for schema in schemas]
        for checker, text in zip(checkers, texts[-1], strict=True):
            checker.validate(json.loads(text))
        # The control: an answer to another schema is hardly one to this.
        swapped = [checker.is_valid(json.loads(text)) for checker, text in zip(checkers, texts[-1][::-1], strict=True)]
        assert sum(swapped) < num_schemas / 2
    print(f"{sum(map(len, texts[0]))} characters, {pace:.2f} tokens a step with drafts; {texts[0][:8]}")
    assert texts[0] == texts[1]
    assert pace > 1.05
