"""Whatever a model wants to say, what comes out is of the grammar: also with drafts, and after thinking."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
import torch

from glm5.engine.sampling import Placement, Sampler, SamplingParams, StructuredOutputsParams, accept, grammar
from glm5.engine.sampling.grammar import Matcher
from tests.support.tokenizers import tiny_tokenizer
from tests.unit.engine.sampling.oracle import rows_of
from tests.unit.engine.sampling.schemas import SchemaMaker, compiler, vocabulary

NUM_SCHEMAS, LIMIT = 70, 700
TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_ids[0]
CLOSERS = [*(TOKENIZER.encode(char)[0] for char in '"}],'), EOS]


def matcher_of(starts_after: int | None = None, **fields: Any) -> Matcher:
    return Matcher(compiler().compile(StructuredOutputsParams(**fields)).result(), starts_after)


def mask_of(matcher: Matcher, *drafts: int) -> list[set[int]]:
    """Tokens allowed in each row."""
    mask = torch.zeros(len(drafts) + 1, -(-vocabulary().size // 32), dtype=torch.int32)
    matcher.fill(drafts, mask)
    bits = (mask[:, :, None] >> torch.arange(32)) & 1
    return [set(row.nonzero().flatten().tolist()) for row in bits.flatten(1)[:, : vocabulary().size]]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def generate(matchers: list[Matcher], seed: int, depth: int, wishes: torch.Tensor) -> list[list[int]]:
    """What a model says that wants `wishes`, more so the closing tokens the longer it talks."""
    num, gen, vocab_size = len(matchers), torch.Generator().manual_seed(seed), vocabulary().size
    sampler = Sampler(num, vocab_size, max_drafts=depth)
    grammar = StructuredOutputsParams(json_object=True)  # says that there is one; the matchers are the grammars
    params = SamplingParams(structured_outputs=grammar, max_tokens=None)
    sampler.place([Placement(slot, params, seed + slot, [1]) for slot in range(num)])
    written: list[list[int]] = [[] for _ in matchers]
    active = list(range(num))
    while active:
        drafts_Y = torch.full((num + 1, depth), -1)
        drafts_Y[:-1] = torch.randint(0, vocab_size, (num, depth), generator=gen)
        masks = torch.zeros(len(active), depth + 1, -(-vocab_size // 32), dtype=torch.int32)
        for row, slot in enumerate(active):
            if depth and (allowed := mask_of(matchers[slot])[0]):  # a drafter that is right at times
                drafts_Y[slot, 0] = min(allowed)
            matchers[slot].fill(drafts_Y[slot].tolist(), masks[row])
        sampler.permit(active, masks)
        where = [(slot, offset) for slot in active for offset in range(depth + 1)]
        positions = [len(written[slot]) + 1 + offset for slot, offset in where]
        logits = torch.stack(
            [wishes[slot, position % 64] for (slot, _), position in zip(where, positions, strict=True)]
        )
        for row, position in enumerate(positions):
            logits[row, CLOSERS] += position / 12
        rows = rows_of([slot for slot, _ in where], positions, [offset for _, offset in where])
        sampled = sampler.sample(logits, rows, drafts_Y)
        accepted = accept(sampled.token_T, rows.slot_T, rows.offset_T, drafts_Y)
        for slot in tuple(active):
            new = accepted.tokens_Y[slot, : accepted.count_Y[slot]].tolist()
            new = new[: new.index(EOS) + 1] if EOS in new else new
            new = next((new[: at + 1] for at, token in enumerate(new) if token in TOKENIZER.eos_ids), new)
            assert matchers[slot].advance(new)
            written[slot] += new
            assert len(written[slot]) < LIMIT, TOKENIZER.decode(written[slot])
            if new[-1] in TOKENIZER.eos_ids:
                active.remove(slot)
    return [tokens[:-1] for tokens in written]


def test_every_answer_to_random_schemas_is_valid(seed):
    """Random wishes, two answers each: drafts change nothing. Every schema is one that people may write."""
    maker = SchemaMaker(random.Random(seed))
    schemas = [maker.schema() for _ in range(NUM_SCHEMAS)]
    texts = []
    for depth in (0, 2):
        matchers = [matcher_of(json=schema) for schema in schemas]
        wishes = torch.randn(NUM_SCHEMAS, 64, vocabulary().size, generator=torch.Generator().manual_seed(seed)) * 2
        texts.append([TOKENIZER.decode(tokens) for tokens in generate(matchers, seed, depth, wishes)])
    for schema, text in zip(schemas, texts[0], strict=True):
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert texts[0] == texts[1]


KINDS = [
    ({"regex": r"[a-c]{2,5}x\d"}, lambda text: re.fullmatch(r"[a-c]{2,5}x\d", text)),
    ({"choice": ["yes", 'no "or"\n', "später", "yes but"]}, {"yes", 'no "or"\n', "später", "yes but"}.__contains__),
    ({"grammar": 'root ::= pair ("," pair)*\npair ::= [a-z] "=" [0-9]+'}, lambda t: re.fullmatch(r"(\w=\d+,?)+", t)),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"json": {"type": "array", "items": {}}, "disable_any_whitespace": True}, json.loads),
]


@pytest.mark.parametrize(("fields", "valid"), KINDS, ids=[next(iter(fields)) for fields, _ in KINDS])
def test_other_kinds_of_constraint(fields, valid, seed):
    matchers = [matcher_of(**fields) for _ in range(8)]
    wishes = torch.randn(8, 64, vocabulary().size, generator=torch.Generator().manual_seed(seed)) * 2
    for tokens in generate(matchers, seed, 1, wishes):
        assert valid(TOKENIZER.decode(tokens))


def test_structural_tags_of_tool_calls():
    """Free text until a call begins, then its arguments' schema, then free text or the end."""
    arguments = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    content = {"type": "json_schema", "json_schema": arguments}
    call = {"type": "tag", "begin": "<tool_call>f\n", "content": content, "end": "</tool_call>"}
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [call]}
    matcher = matcher_of(structural_tag={"type": "structural_tag", "format": form})
    assert EOS in mask_of(matcher)[0]
    assert matcher.advance(ids("any text <tool_call>"))
    assert mask_of(matcher)[0] == set(ids("f"))
    assert matcher.advance(ids('f\n{"a": 1'))
    assert EOS not in mask_of(matcher)[0]
    assert matcher.advance([*ids("}</tool_call> more"), EOS])


def test_a_grammar_that_is_made_to_be_slow(monkeypatch):
    """Nested repetitions: what may come next takes longer with every token, and is found out."""
    monkeypatch.setattr(grammar, "MAX_SECONDS", 0.05)
    matcher = matcher_of(grammar="root ::= " + "(" * 150 + '"a"' + "+)" * 150)
    for _ in range(60):
        mask_of(matcher)
        assert matcher.advance(ids("a"))
        if matcher.is_slow:
            break
    assert matcher.is_slow
    usual = matcher_of(json={"type": "object"})
    mask_of(usual)
    assert not usual.is_slow


def test_before_a_grammar_begins():
    """Some tokens may not come before it, and after the budget nothing but the token that it begins after."""
    end, call, word = ids("</think>")[0], ids("<tool_call>")[0], ids("a")[0]
    compiled = compiler().compile(StructuredOutputsParams(choice=["yes"])).result()
    matcher = Matcher(compiled, end, not_before=(EOS, call), budget=3)
    everything = set(range(vocabulary().size))
    assert mask_of(matcher)[0] == everything - {EOS, call}
    assert mask_of(matcher, word, word, word, end) == [*[everything - {EOS, call}] * 3, {end}, set(ids("yes")[:1])]
    assert mask_of(matcher, word, EOS, end)[2:] == [everything, everything], "rows after a draft that will not stand"
    assert matcher.advance([word, word])
    assert mask_of(matcher, word) == [everything - {EOS, call}, {end}]
    assert not matcher.advance([call])
    assert matcher.advance([word, end])
    assert mask_of(matcher)[0] == set(ids("yes")[:1])


def test_a_budget_without_a_grammar():
    end, word = ids("</think>")[0], ids("a")[0]
    matcher, everything = Matcher(None, end, budget=0), set(range(vocabulary().size))
    assert mask_of(matcher, end) == [{end}, everything]
    assert not matcher.advance([word])
    assert matcher.advance([end, word, EOS])
    early = Matcher(None, end, budget=1)
    assert early.advance([end, *[word] * 9])
    assert mask_of(early)[0] == everything
    assert mask_of(Matcher(None, None, budget=0))[0] == everything, "an answer that does not think"


def test_masks_after_drafts_are_those_after_tokens():
    matcher, text = matcher_of(json={"type": "object"}), [*ids('{"ab": [1, true], "c": {}}'), EOS]
    for start in range(len(text)):
        drafts = text[start : start + 4]
        rows = mask_of(matcher, *drafts)
        ahead = matcher_of(json={"type": "object"})
        assert ahead.advance(text[:start])
        for row, draft in zip(rows, [*drafts, None], strict=True):
            assert mask_of(ahead)[0] == row
            if draft is not None:
                assert draft in row
                assert ahead.advance([draft])
        assert mask_of(matcher)[0] == rows[0]
        assert matcher.advance(text[start : start + 1])
    assert mask_of(matcher, 5, 6) == [set(range(vocabulary().size))] * 3  # over


def test_rows_after_a_draft_that_is_not_allowed_are_free():
    matcher = matcher_of(regex="abc")
    first, second, third = mask_of(matcher, *ids("ax"))
    assert first == set(ids("a"))
    assert second == set(ids("b"))
    assert third == set(range(vocabulary().size))
    assert not matcher.advance(ids("x"))


def test_thinking_comes_before_the_grammar():
    end = TOKENIZER.id_of("</think>")
    matcher = matcher_of(regex="ab", starts_after=end)
    everything = set(range(vocabulary().size))
    rows = mask_of(matcher, *ids("z"), end, *ids("ab"))
    assert rows == [everything, everything, set(ids("a")), set(ids("b")), set(TOKENIZER.eos_ids)]
    assert matcher.advance(ids("anything at all"))
    assert mask_of(matcher)[0] == everything
    assert matcher.advance([end])
    assert mask_of(matcher)[0] == set(ids("a"))


def test_control_tokens_are_never_text():
    """Not even where any text is allowed: an end token ends it, and no role can be spelled by its token."""
    allowed = mask_of(matcher_of(regex=r"(.|\n)*"))[0]
    control = {TOKENIZER.id_of(token) for token in ("<|user|>", "<|system|>", "<sop>")}
    assert allowed & control == control & set(TOKENIZER.eos_ids)
    assert allowed & set(range(TOKENIZER.vocab_size, vocabulary().size)) == set()


@pytest.mark.parametrize("more", [{}, {"maxLength": 9}, {"minLength": 1}, {"pattern": "^.*$"}], ids=str)
def test_strings_hold_no_bare_control_characters(more):
    control = {token for code in range(32) for token in ids(chr(code))}
    assert len(control) == 32
    schema = {"type": "string", **more}
    form = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    tag = {"type": "structural_tag", "format": form}
    for matcher, text in ((matcher_of(json=schema), '"a'), (matcher_of(structural_tag=tag), '<f>"a')):
        assert matcher.advance(ids(text))
        allowed = mask_of(matcher)[0]
        assert set(ids("x")) <= allowed
        assert not allowed & control


def test_allowed_token_ids_hold_beside_a_grammar():
    sampler = Sampler(1, vocabulary().size)
    grammar = StructuredOutputsParams(regex="[a-d]")
    allowed = ids("b") + ids("z")
    sampler.place([Placement(0, SamplingParams(structured_outputs=grammar, allowed_token_ids=allowed), 3, [1])])
    mask = torch.zeros(1, 1, -(-vocabulary().size // 32), dtype=torch.int32)
    matcher_of(regex="[a-d]").fill([], mask[0])
    sampler.permit([0], mask)
    sampled = sampler.sample(torch.randn(1, vocabulary().size).expand(50, -1), rows_of([0] * 50, range(50)))
    assert set(sampled.token_T.tolist()) == set(ids("b"))


MARKUP = {token_id for token_id in range(vocabulary().size) if vocabulary().is_markup(token_id)}


def test_tags_are_no_text():
    """A tag's token in a JSON string or a matched text would be a tag to whoever reads the answer."""
    for fields, start in (
        ({"json": {"type": "object"}}, '{"a": "x'),
        ({"json_object": True}, '{"'),
        ({"regex": "a.*"}, "a"),
    ):
        matcher = matcher_of(**fields)
        assert matcher.advance(ids(start))
        allowed = mask_of(matcher)[0]
        assert len(allowed) > 50
        assert not allowed & MARKUP
    # The control: a grammar that spells a tag gets it.
    matcher = matcher_of(regex="a.*</think>")
    assert matcher.advance(ids("a"))
    assert TOKENIZER.id_of("</think>") in mask_of(matcher)[0]
