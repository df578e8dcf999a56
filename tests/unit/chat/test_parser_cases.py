"""Every listed case of reasoning and tool calls, at every chunk size, from text and from tokens."""

import pytest

from glm5.chat import collect
from tests.support.answers import CASES, CHUNK_SIZES, fed_ids, fed_text

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_text_without_tokens(case):
    for size in CHUNK_SIZES:
        case.check(collect(fed_text(case.parser(None), case.text, size)))


@every_case
def test_tokens(case, tokenizer):
    ids = tokenizer.encode(case.text)
    for size in CHUNK_SIZES:
        case.check(collect(fed_ids(case.parser(tokenizer), tokenizer, ids, size)))


@every_case
def test_tokens_of_a_tokenizer_without_these_tags(case, bare_tokenizer):
    ids = bare_tokenizer.encode(case.text)
    for size in CHUNK_SIZES:
        case.check(collect(fed_ids(case.parser(bare_tokenizer), bare_tokenizer, ids, size)))


def test_tags_whose_text_is_not_shown(tokenizer):
    """Engines that skip special tokens give the same calls; a tag that means nothing is not shown either."""
    for case in CASES:
        if case.calls and case.content is None and case.reasoning is None:
            case.check(collect(fed_ids(case.parser(tokenizer), tokenizer, tokenizer.encode(case.text), hide=True)))
    case = next(case for case in CASES if case.name == "tools not parsed")
    parsed = collect(fed_ids(case.parser(tokenizer), tokenizer, tokenizer.encode(case.text), hide=True))
    assert parsed.content == "aget_weathercityBeijingb"
