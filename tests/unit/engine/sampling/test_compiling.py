"""Grammars compile aside, within bounds; what cannot be honoured is refused with its reason."""

import sys
import threading
import time
import tracemalloc

import pytest

from glm5.common.errors import MissingExtra, RequestError
from glm5.engine.sampling import StructuredOutputsParams
from glm5.engine.sampling.compiling import Compiler, Vocabulary
from glm5.engine.sampling.params import MAX_CHARS
from glm5.engine.sampling.schema import refuse_unenforced
from tests.unit.engine.sampling.schemas import compiler, vocabulary

PATIENCE_S = 60.0


def refusal(**fields) -> str:
    with pytest.raises(RequestError) as caught:
        compiler().compile(StructuredOutputsParams(**fields)).result()
    assert caught.value.param == "structured_outputs"
    assert "/cpp/" not in str(caught.value)
    return str(caught.value)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
UNENFORCED = [
    ({"type": "number", "multipleOf": 0.5}, "#/multipleOf"),
    ({"type": "integer", "multipleOf": 7, "maximum": -3}, "#/multipleOf"),
    ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, "#/minimum"),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "#/uniqueItems"),
    ({"type": "array", "minItems": 1}, "#/minItems"),
    ({"type": "array", "maxItems": 2, "prefixItems": [{"type": "string"}]}, "#/maxItems"),
    ({"type": "array", "contains": {"const": 5}}, "#/contains"),
    ({"type": "string", "pattern": "^[ab]*$", "minLength": 3}, "#/minLength"),
    ({"type": "string", "format": "date", "maxLength": 3}, "#/maxLength"),
    ({"type": "string", "pattern": "^a$", "format": "date"}, "#/pattern"),
    ({"type": "string", "format": "json-pointer"}, "#/format"),
    ({"type": "string", "pattern": 'a"b'}, "#/pattern"),
    ({"type": "string", "pattern": r"\\d"}, "#/pattern"),
    ({"type": "string", "pattern": r"a\nb"}, "#/pattern"),
    ({"type": "string", "pattern": r"\x22"}, "#/pattern"),
    ({"type": "string", "pattern": "a^b"}, "#/pattern"),
    ({"type": "string", "pattern": "^[a-z]{3,200}$"}, "#/pattern"),
    ({"type": "string", "pattern": "^(ab){129}$"}, "#/pattern"),
    ({"type": "string", "pattern": "a$b"}, "#/pattern"),
    (OBJECT | {"dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
    (OBJECT | {"dependentSchemas": {"a": {"required": ["b"]}}}, "#/dependentSchemas"),
    (OBJECT | {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "#/if"),
    ({"type": "integer", "not": {"const": 5}}, "#/not"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
    ({"oneOf": [OBJECT, OBJECT | {"required": ["a"]}]}, "#/oneOf"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "#/allOf"),
    (OBJECT | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "#/properties"),
    ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": -5}]}, "#/type"),
    ({"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 5}, "#/minimum"),
    ({"type": "string", "enum": ["a", 1]}, "#/enum"),
    ({"enum": [1, 2, 3], "minimum": 2}, "#/minimum"),
    ({"type": "string", "const": 1}, "#/const"),
    ({"type": "integer", "const": True}, "#/const"),
    ({"minimum": 3}, "#/minimum"),
    ({"pattern": "^a$"}, "#/pattern"),
    ({"minItems": 2}, "#/minItems"),
    ({"required": ["a"]}, "#/required"),
    ({"type": "object", "required": ["z"], "additionalProperties": True}, "#/required"),
    ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "#/minProperties"),
    ({"type": "object", "patternProperties": {"^x": {}, "y$": {}}}, "#/patternProperties"),
    ({"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": {}}, "#/patternProperties"),
    (OBJECT | {"patternProperties": {"^a": {"type": "string"}}}, "#/patternProperties"),
    (OBJECT | {"propertyNames": {"pattern": "^[xy]$"}}, "#/propertyNames"),
    ({"$ref": "#foo", "$defs": {"n": {"$anchor": "foo"}}}, "$ref"),
    ({"$ref": "http://example.com/x"}, "$ref"),
    ({"$ref": "#/$defs/x"}, "#/$defs/x"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "refers to itself"),
    ({"type": "array", "items": {"$id": "http://a/b", "type": "integer"}}, "#/items/$id"),
    ({"type": "array", "items": {"anyOf": [{"type": "null"}, {"not": {}}]}}, "#/items/anyOf/1/not"),
    ({"$defs": {"x": {"not": {}}}, "type": "array", "items": {"$ref": "#/$defs/x"}}, "#/$defs/x/not"),
]


@pytest.mark.parametrize(("schema", "place"), UNENFORCED, ids=str)
def test_what_a_grammar_would_not_enforce_is_refused_by_its_place(schema, place):
    assert place in refusal(json=schema)
    inside = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    assert place in refusal(structural_tag=inside)


GOOD = [
    {}, True, {"type": "integer", "minimum": 3, "description": "minimum of 3"}, {"enum": ["not", "if"]},
    {"type": "string", "pattern": r"^\w+[$^\]]?\$\d$", "title": "a^b"}, {"type": "string", "pattern": r"^a|b$"},
    {"type": "string", "format": "color", "default": "red"}, {"type": "string", "enum": ["a"]},
    {"type": "object", "properties": {"not": {"type": "string"}, "if": {"$ref": "#/properties/not"}}},
    {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "integer"}, "unused": {"not": {}}}, "title": "t"},
    {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": {"type": "integer"}},
    {"oneOf": [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/q"}], "discriminator": {"propertyName": "t"},
     "$defs": {name: {"type": "object", "properties": {"t": {"const": name}}, "required": ["t"]} for name in "pq"}},
    {"type": "array", "items": {"$ref": "#"}}, {"type": ["object", "null"], "properties": {}, "required": []},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "x", "type": "integer", "nullable": True},
]  # fmt: skip


@pytest.mark.parametrize("schema", GOOD, ids=str)
def test_what_people_write_is_not_refused(schema):
    assert compiler().compile(StructuredOutputsParams(json=schema if isinstance(schema, dict) else "true")).result()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": "{bad"}, "not JSON"),
        ({"json": "[" * 100_000}, "not JSON"),
        ({"json": "[1]"}, "allowed: an object"),
        ({"json": {"type": "object", "properties": []}}, "wrong type"),
        ({"json": {"type": "object", "required": 5}}, "wrong type"),
        ({"json": {"type": "foo"}}, 'Unsupported type "foo"'),
        ({"json": "false"}, "cannot accept any value"),
        ({"json": {"$ref": "#"}}, "refers to itself"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum greater than maximum"),
        ({"regex": "(a"}, "parenthesis is not closed"),
        ({"regex": "(?=a)b"}, "Lookahead is not supported"),
        ({"regex": "a" * (MAX_CHARS + 1)}, f"more than {MAX_CHARS} characters"),
        ({"grammar": "start ::= 'a'"}, "structured_outputs is not understood"),
        ({"grammar": "root ::= nothing"}, '"nothing" is not defined'),
        ({"grammar": "root ::= \u00e9"}, "Unexpected character"),  # the message shows half of it
        ({"grammar": "root ::= root"}, "matches no text"),
        ({"structural_tag": {"format": {}}}, "not understood"),
        ({"structural_tag": "nope"}, "not JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_grammars_are_refused_with_the_reason(fields, reason):
    assert reason in refusal(**fields)


def test_what_would_take_long_to_look_through_is_refused_at_once():
    name = "x" * 40 + "!"
    slow = {"type": "object", "properties": {name: {}}, "patternProperties": {"^(x+)+$": {}}}
    assert "#/patternProperties has a pattern that a name in properties matches" in refusal(json=slow)
    slow["patternProperties"] = {"^x*x*x*x*x*x*x*x*x*x*x*x*$": {}}
    assert "#/patternProperties" in refusal(json=slow)
    fine = {"type": "object", "properties": {"abc": {}}, "patternProperties": {"^x[0-9]+$": {"type": "integer"}}}
    assert compiler().compile(StructuredOutputsParams(json=fine)).result()
    assert "#/pattern has 50000 characters; allowed: 4096" in refusal(json={"type": "string", "pattern": "[" * 50_000})
    assert "#/oneOf has 5000 alternatives; allowed: 256" in refusal(json={"oneOf": [{}] * 5000})


def test_references_to_references_are_followed_so_far():
    chain = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(70)} | {"r70": {"type": "integer"}}
    long = {"$defs": chain, "$ref": "#/$defs/r0"}
    assert "#/$defs/r0 refers through more than 64 references" in refusal(json=long)
    assert compiler().compile(StructuredOutputsParams(json=long | {"$ref": "#/$defs/r7"})).result()


def test_places_are_written_out_for_a_complaint_alone():
    """Of a long name with many others in it, each place would be as long."""
    name, inner = "x" * 10_000, {f"{i}": {} for i in range(2000)}
    schema = {"type": "object", "properties": {name: {"type": "object", "properties": inner}}}
    tracemalloc.start()
    refuse_unenforced(schema)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < len(name) * len(inner) / 4
    inner["7"] = {"not": {}}
    with pytest.raises(RequestError, match=f"#/properties/{name}/properties/7/not cannot be enforced"):
        refuse_unenforced(schema)


@pytest.mark.parametrize(("left", "right"), [(1, 1.0), (True, 1), ([1], [1.0]), ({"a": [1]}, {"a": [1]}), ("x", "x")])
def test_values_of_two_alternatives_that_are_the_same(left, right):
    both = {"oneOf": [{"enum": [left, "a"]}, {"enum": ["b", right]}]}
    assert "alternatives that may both hold" in refusal(json=both)
    assert (
        compiler()
        .compile(StructuredOutputsParams(json={"oneOf": [{"enum": [[1], {"a": 1}]}, {"enum": [[2]]}]}))
        .result()
    )


def optional(count: int, **more) -> dict:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}, **more}


def test_what_would_take_long_to_compile_is_refused_at_once():
    assert "repeats 129 parts; allowed: 128" in refusal(regex="a*" * 129)
    assert "repeats 129 parts; allowed: 128" in refusal(json={"type": "string", "pattern": "a?" * 129})
    assert "repeats 1025 parts; allowed: 1024" in refusal(grammar="root ::= " + '"a"* ' * 1025)
    inner = {"type": "sequence", "elements": [{"type": "regex", "pattern": "(a|b)*" * 129}]}
    assert "repeats 129 parts" in refusal(structural_tag={"type": "structural_tag", "format": inner})
    assert "has 20000 characters; allowed in a regex: 16384" in refusal(regex="a" * 20_000)
    assert "#/minProperties counts among 65 optional" in refusal(json=optional(65, minProperties=2))
    assert "#/maxProperties counts among 65 optional" in refusal(json=optional(65, maxProperties=64))
    required = [f"p{i}" for i in range(40)]
    fine = [
        {"regex": r"[*+?]\*(?:a)" * 128 + "a*" * 128},
        {"grammar": 'root ::= "****" [*+?]* # ****' + "*" * 2000},
        {"json": optional(200)},
        {"json": optional(100, required=required, minProperties=40, maxProperties=100)},
        {"json": optional(60, required=required, minProperties=45)},
    ]
    for fields in fine:
        assert compiler().compile(StructuredOutputsParams(**fields)).result()


@pytest.mark.parametrize("kind", ["regex", "grammar", "json"])
@pytest.mark.parametrize(
    "part", ["[", "(", '"', "[\\", '"\\', "[\\\n", '"\\\n', "(?", "{", "|", "#", "\n", "(a|", "root ::= ", "a b c"]
)
def test_nothing_takes_long_to_look_through(kind, part):
    """Whatever it begins, again and again, and never ends."""
    text = (part * MAX_CHARS)[: MAX_CHARS - 50]
    assert "within" not in refusal(**{kind: {"type": "string", "pattern": text} if kind == "json" else text})


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_nesting_is_bounded():
    assert compiler().compile(StructuredOutputsParams(json=nested(60))).result()
    assert "nested more than" in refusal(json=nested(65))
    assert "nested more than" in refusal(json=nested(200))


@pytest.mark.parametrize("number", ["9223372036854775808", "-18446744073709551617", "1" + "0" * 400, "1e400"])
def test_numbers_that_no_grammar_has_exactly_are_refused(number):
    assert "beyond 64 bits" in refusal(json=f'{{"const": {number}}}')
    assert "beyond 64 bits" in refusal(json=f'{{"type": "integer", "minimum": {number}}}')
    assert compiler().compile(StructuredOutputsParams(json='{"const": 9223372036854775807}')).result()


def test_without_xgrammar_the_request_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    lone = Compiler(vocabulary())
    with pytest.raises(MissingExtra, match=r"pip install 'glm5\[grammar\]'"):
        lone.compile(StructuredOutputsParams(regex="a")).result()
    lone.close()


def test_a_model_without_an_end_token_has_no_grammars():
    lone = Compiler(Vocabulary(10, (), lambda token_id: bytes([97 + token_id])))
    with pytest.raises(RequestError, match="end token"):
        lone.compile(StructuredOutputsParams(regex="a")).result()
    lone.close()


class Gated(Compiler):
    """Compiles nothing but "quick" before it may."""

    def __init__(self, **options) -> None:
        super().__init__(vocabulary(), **options)
        self.gate, self.begun = threading.Event(), []

    def _compiled(self, wanted):
        self.begun.append(wanted.text)
        assert wanted.text == "quick" or self.gate.wait(PATIENCE_S)
        return super()._compiled(wanted)

    def requested(self, *regexes):
        return [self.compile(StructuredOutputsParams(regex=regex)) for regex in regexes]


def until(is_so):
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


@pytest.fixture
def gated(request):
    """A compiler with these options; it may go on in the end."""
    gated = Gated(**request.param)
    yield gated
    gated.gate.set()
    gated.close()


@pytest.mark.parametrize("gated", [{"num_threads": 1}], indirect=True)
def test_nobody_waits_for_a_compilation(gated):
    first, second = gated.requested("a+", "b+")
    assert not first.ready()
    assert not second.ready()
    gated.gate.set()
    assert second.result()
    assert first.ready()


@pytest.mark.parametrize("gated", [{"timeout_s": 0.01}], indirect=True)
def test_one_that_takes_too_long_is_refused(gated):
    (slow,) = gated.requested("a+")
    with pytest.raises(RequestError, match=r"0\.01 s"):
        slow.result()
    assert slow.ready()


@pytest.mark.parametrize("gated", [{"num_threads": 2, "max_slow": 3, "slow_s": 0.0}], indirect=True)
def test_those_that_hang_hold_up_no_others(gated):
    hanging = gated.requested("a", "b", "c")
    (quick,) = gated.requested("quick")
    until(quick.ready)  # each call starts a thread where one is missing
    assert quick.result()
    assert not any(one.ready() for one in hanging)
    assert len(gated._workers.threads) <= 5
    gated.gate.set()
    assert all(one.result() for one in hanging)
    until(lambda: len(gated._workers.threads) <= 2)  # no more than are needed go on
    assert gated.requested("d")[0].result()


@pytest.mark.parametrize("gated", [{"num_threads": 1, "max_slow": 1, "slow_s": 0.0, "timeout_s": 0.2}], indirect=True)
def test_where_too_many_hang_the_others_are_told(gated):
    hanging, (quick,) = gated.requested("a", "b"), gated.requested("quick")
    until(lambda: all(one.ready() for one in (*hanging, quick)))
    for one in hanging:
        with pytest.raises(RequestError, match=r"did not compile within 0\.2 s"):
            one.result()
    with pytest.raises(RequestError, match=r"waited 0\.2 s while others were compiled; try again later"):
        quick.result()
    assert gated.begun == ["a", "b"]


@pytest.mark.parametrize("gated", [{"num_threads": 1, "max_slow": 0}], indirect=True)
def test_what_nobody_waits_for_is_not_compiled(gated):
    (hanging,), gone = gated.requested("a"), gated.requested("b", "c")
    (joined,), (last,) = gated.requested("b"), gated.requested("d")
    del gone
    gated.gate.set()
    assert all(one.result() for one in (hanging, joined, last))
    assert gated.begun == ["a", "b", "d"]
    assert gated.requested("c")[0].result()  # asked for again, it is compiled


@pytest.mark.parametrize("gated", [{"num_threads": 1, "max_slow": 0}], indirect=True)
def test_not_too_many_wait(gated):
    waiting = gated.requested("a", *(f"b{number}" for number in range(255)))
    until(lambda: gated.begun == ["a"])
    waiting += gated.requested("c")
    with pytest.raises(RequestError, match="cannot be compiled now, as 256 others wait for it; try again later"):
        gated.requested("d")
    assert gated.requested("b7")  # whoever has asked already is joined
    del waiting


def test_a_closed_compiler_compiles_again_when_asked():
    """Who shares one with somebody that closes it must not wait for ever."""
    shared = Compiler(vocabulary())
    for regex in ("a", "b"):
        shared.close()
        assert shared.compile(StructuredOutputsParams(regex=regex)).result()
    shared.close()


def test_the_same_grammar_is_compiled_once():
    again = [compiler().compile(StructuredOutputsParams(regex="abc+")).result() for _ in range(2)]
    assert again[0] is again[1]


def test_but_once_for_each_salt():
    """How long a grammar takes says whether somebody has asked for it before."""
    wanted, fresh = StructuredOutputsParams(regex="abcd+"), Compiler(vocabulary())
    first, second, again = (fresh.compile(wanted, salt).result() for salt in (b"alice", b"bob", b"alice"))
    assert first is again
    assert first is not second
    fresh.close()
    other = compiler().compile(StructuredOutputsParams(json_object=True, disable_any_whitespace=True)).result()
    assert other is not compiler().compile(StructuredOutputsParams(json_object=True)).result()


def test_the_cache_is_bounded():
    small = Compiler(vocabulary(), cache_bytes=1)
    first = small.compile(StructuredOutputsParams(regex="a"))
    kept = first.result()
    small.compile(StructuredOutputsParams(regex="b")).result()
    assert first.result() is kept  # who has it keeps it
    assert small.compile(StructuredOutputsParams(regex="a")).result() is not kept
    small.close()


def test_closing_ends_the_threads():
    lone = Compiler(vocabulary(), num_threads=2)
    lone.compile(StructuredOutputsParams(regex="a")).result()
    threads = list(lone._workers.threads)
    lone.close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
