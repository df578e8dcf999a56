"""Whatever a model wants to say, its calls are of the tools and their arguments of the schemas, as the parser reads
them."""

import json
import random

import jsonschema
import pytest

from glm5.chat.parser import parse_ids
from glm5.common.errors import RequestError
from glm5.engine.sampling import StructuredOutputsParams
from glm5.engine.sampling.grammar import Matcher
from glm5.serve.generation.call_grammar import CallGrammar
from tests.support.tokenizers import tiny_tokenizer
from tests.support.walks import walk
from tests.unit.engine.sampling.schemas import compiler

TOKENIZER = tiny_tokenizer()
GRAMMAR = CallGrammar(TOKENIZER)
CLOSERS = dict.fromkeys(TOKENIZER.encode('"}]'), 2.0) | dict.fromkeys(
    [*TOKENIZER.eos_ids, *TOKENIZER.encode("</arg_key></arg_value></tool_call>")], 10.0
)
EAGER = CLOSERS | {TOKENIZER.encode("<tool_call>")[0]: 20.0}
NUM_WALKS = 4
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def tool(name, parameters=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def obj(*required, **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def written(form, seed, closers=CLOSERS):
    tag = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    matcher = Matcher(compiler().compile(tag).result())
    return walk(matcher, TOKENIZER, random.Random(seed), closers=closers)


def calls_of(ids, tools):
    parsed = parse_ids(TOKENIZER, ids, tools, reasoning=False)
    return parsed, [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


NODE = obj("v", v={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})
DEFINITIONS = {"n": NODE, "c": {"enum": [1, "x"]}}
EXACT = {
    "string": obj("a", a={"type": "string"}),
    "optional": obj("b", a={"type": "string"}, b={"type": "integer"}, c={"type": "boolean"}),
    "number": obj("a", a={"type": "number", "description": "how much of <tool_call>"}),
    "null": obj("a", a={"type": "null"}),
    "enum": obj("a", a={"enum": ["red", "7", 8, None, True, {"x": [1]}]}),
    "enum with nothing": obj("a", a={"type": "string", "enum": ["", "ab", "abc"]}),
    "const": obj("a", a={"const": "only"}),
    "nothing at all": obj("a", a={"const": ""}),
    "nullable": obj("a", a={"type": ["string", "null"]}),
    "number or boolean": obj("a", a={"type": ["number", "boolean"]}),
    "union": obj("a", a={"anyOf": [{"type": "integer"}, obj("x", x={"type": "string"}), {"enum": ["north", "south"]}]}),
    "type beside union": obj("a", a={"type": "string", "anyOf": [{"pattern": "^a+$"}, {"enum": ["b"]}]}),
    "allOf of one": obj("a", a={"allOf": [{"type": "integer", "minimum": 3, "maximum": 99}]}),
    "pattern": obj("a", a={"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}),
    "longest": obj("a", a={"type": "string", "maxLength": 5}),
    "shortest": obj("a", a={"type": "string", "minLength": 3, "maxLength": 6}),
    "array": obj("a", a={"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3}),
    "object": obj("a", a={"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}),
    "definitions": {**obj("a", a={"$ref": "#/$defs/n"}, b={"$ref": "#/$defs/c"}), "$defs": DEFINITIONS},
    "no arguments": obj(),
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "one of two objects": {"anyOf": [obj("kind", "r", kind={"const": "circle"}, r={"type": "number"}),
                                     obj("kind", "w", kind={"const": "square"}, w={"type": "integer"})]},
    "not described": {"type": "object", "required": ["a"], "additionalProperties": True},
} | {f"format {name}": obj("a", a={"type": "string", "format": name})
     for name in ("date", "time", "date-time", "email", "uuid", "ipv4", "hostname", "uri")}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_arguments_are_of_the_schema(name):
    tools = [tool("f", EXACT[name], strict=True)]
    for seed in range(NUM_WALKS):
        parsed, calls = calls_of(written(GRAMMAR.calls(tools, parallel=False, strict=True), seed), tools)
        assert parsed.content is None
        [(called, arguments)] = calls
        assert called == "f"
        jsonschema.validate(arguments, EXACT[name], format_checker=FORMATS)


def test_the_check_notices_a_wrong_schema():
    """The control: arguments of one schema do not pass for those of another."""
    tools = [tool("f", EXACT["enum"])]
    _, [(_, arguments)] = calls_of(written(GRAMMAR.calls(tools, parallel=False, strict=True), 0), tools)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(arguments, EXACT["number"])


def test_several_tools_and_calls():
    tools = [
        tool("get", obj("a", a={"type": "integer"})),
        tool("get_all", obj()),
        tool("say", obj("t", t={"type": "string"})),
    ]
    names, counts = set(), set()
    for seed in range(30):
        parsed, calls = calls_of(written(GRAMMAR.calls(tools, parallel=True, strict=True), seed, EAGER), tools)
        assert parsed.content is None
        assert parsed.complete
        names |= {name for name, _ in calls}
        counts.add(len(calls))
    assert names == {"get", "get_all", "say"}
    assert counts > {1}


def test_text_with_calls_of_strict_tools():
    """Free text, and calls; those of a strict tool are held to its schema, others only to the form."""
    strict, free = tool("f", obj("a", a={"type": "integer"}), strict=True), tool("g", obj("a", a={"type": "integer"}))
    seen = {"f": 0, "g": 0}
    for parallel in (True, False):
        form = GRAMMAR.text_with_calls([strict, free], parallel=parallel)
        for seed in range(20):
            parsed, calls = calls_of(written(form, seed, EAGER), [strict, free])
            assert parsed.complete
            assert parallel or len(calls) <= 1
            for name, arguments in calls:
                seen[name] += 1
                if name == "f":
                    jsonschema.validate(arguments, strict["function"]["parameters"])
    assert min(seen.values()) > 2


UNENFORCEABLE = {
    "not": obj("a", a={"type": "integer", "not": {"const": 3}}),
    "format": obj("a", a={"type": "string", "format": "json-pointer"}),
    "pattern and length": obj("a", a={"type": "string", "pattern": "a+", "minLength": 3}),
    "too many": obj("a", a={"type": "string", "minLength": 500}),
    "allOf": obj("a", a={"allOf": [{"type": "integer"}, {"minimum": 3}]}),
    "no object": {"type": "array"},
    "dependent": {**obj(a={"type": "string"}), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "endless": {
        **obj("a", a={"$ref": "#/$defs/x"}),
        "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}},
    },
}


@pytest.mark.parametrize("name", UNENFORCEABLE)
def test_what_cannot_be_enforced_is_refused_only_if_strict(name):
    with pytest.raises(RequestError, match="the parameters of 'f'") as caught:
        GRAMMAR.calls([tool("f", UNENFORCEABLE[name], strict=True)], parallel=False, strict=True)
    assert caught.value.param == "tools"
    tools = [tool("f", UNENFORCEABLE[name])]
    _, calls = calls_of(written(GRAMMAR.calls(tools, parallel=False, strict=True), 1), tools)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "schema",
    [obj("a", a={"$ref": "#/$defs/none"}), {**obj("a", a={"$ref": "#/$defs/x"}), "$defs": {"x": {"$ref": "#/$defs/x"}}},
     obj("a", a=7)],
    ids=["nowhere", "itself", "no schema"],
)  # fmt: skip
def test_schemas_that_are_none(schema):
    with pytest.raises(RequestError, match="the parameters of 'f'"):
        GRAMMAR.calls([tool("f", schema)], parallel=False, strict=True)


def test_a_tokenizer_without_tags():
    class NoTags:
        def id_of(self, token):
            return None

    with pytest.raises(RequestError, match="no tokens for tool calls"):
        CallGrammar(NoTags())


def union(depth: int, *, is_shared: bool) -> dict:
    """Written out it has 2 ** depth values, of which `depth` are different, or all."""
    schemas = {f"d{depth}": {"type": "integer"}}
    for i in range(depth):
        below = {"$ref": f"#/$defs/d{i + 1}"}
        schemas[f"d{i}"] = {"anyOf": [below, below if is_shared else {"anyOf": [below, {"const": f"{i}"}]}]}
    return {**obj("a", a={"$ref": "#/$defs/d0"}), "$defs": schemas}


def test_a_union_of_one_schema_is_written_once():
    form = GRAMMAR.calls([tool("f", union(13, is_shared=True), strict=True)], parallel=False, strict=True)
    assert json.dumps(form).count("json_schema") == 2


def wide_definitions(count: int) -> dict:
    """Each property brings all definitions."""
    properties = {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/d0"}} for i in range(count)}
    return {**obj(**properties), "$defs": {f"d{i}": {"type": "integer"} for i in range(count)}}


TOO_LARGE = {
    "unions of unions": union(13, is_shared=False),
    "definitions": wide_definitions(200),
    "properties": obj(**{f"p{i}": {} for i in range(1000)}),
    "objects": {"anyOf": [obj(**{f"p{i}{j}": {} for i in range(40)}) for j in range(40)]},
    "enum": obj(a={"enum": list(range(10_000))}),
    "types": obj(a={"type": [f"t{i}" for i in range(1000)], **{f"x{i}": 1 for i in range(1000)}}),
}


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.parametrize("strict", [False, True])
def test_a_grammar_is_measured_while_it_is_built(name, strict):
    with pytest.raises(RequestError, match="parameters of 'f' need too many characters of a grammar") as caught:
        GRAMMAR.calls([tool("f", TOO_LARGE[name], strict=strict)], parallel=False, strict=True)
    assert caught.value.param == "tools"


def test_definitions_are_repeated_where_something_refers_to_them():
    """A hundred numbers beside a definition that none of them is."""
    schema = {**obj(**{f"p{i}": {"type": "integer"} for i in range(100)}), "$defs": {"x": {"enum": ["y" * 5000]}}}
    form = GRAMMAR.calls([tool("f", schema, strict=True)], parallel=False, strict=True)
    assert "yyy" not in json.dumps(form)


def test_unions_of_objects_that_meet_again():
    leaf = obj("a", a={"type": "integer"})
    schemas = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(12)}
    schema = {"$ref": "#/$defs/d0", "$defs": schemas | {"d12": leaf}}
    form = GRAMMAR.calls([tool("f", schema, strict=True)], parallel=False, strict=True)
    assert json.dumps(form).count("json_schema") == 2
