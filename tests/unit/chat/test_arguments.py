"""Types of argument values come from the JSON schema, in every way that schemas say them."""

import json
import warnings

import pytest

from glm5.chat import collect
from glm5.chat.arguments import MAX_LITERAL, Arguments
from glm5.chat.parser import Functions
from glm5.chat.schema import MAX_ALTERNATIVES, MAX_STEPS, Schema, json_equal, json_type
from glm5.common.errors import RequestError
from tests.support.answers import CHUNK_SIZES, Case, call, fed_text

OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
VALUES = [
    # A string is the text as it is, whatever it looks like.
    ({"type": "string"}, "hello", "hello"),
    ({"type": "string"}, "42", "42"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, "true", "true"),
    ({"type": "string"}, "1e2", "1e2"),
    ({"type": "string"}, "123_456", "123_456"),
    ({"type": "string"}, "\\d+", "\\d+"),
    ({"type": "string"}, '{"a":1}', '{"a":1}'),
    ({"type": "string"}, '"quoted"', '"quoted"'),
    ({"type": "string"}, r'"\C|\."', r'"\C|\."'),
    ({"type": "string"}, 'line one\n"quoted" \\ café', 'line one\n"quoted" \\ café'),
    ({"enum": ["a", "b"]}, "a", "a"),
    ({"const": "null"}, "null", "null"),
    ({"const": '{ "a" : true }'}, '{ "a" : true }', '{ "a" : true }'),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "7", "7"),
    # Numbers; quoted ones are read, but never as an integer when they are none.
    ({"type": "integer"}, "42", 42),
    ({"type": "integer"}, " 42\n", 42),
    ({"type": "integer"}, "-12", -12),
    ({"type": "integer"}, '"42"', 42),
    ({"type": "integer"}, r"\"42\"", 42),
    ({"type": "integer"}, "'42'", 42),
    ({"type": "integer"}, "1.5", 1.5),
    ({"type": "integer"}, '"1.5"', "1.5"),
    ({"type": "integer"}, "123abc", "123abc"),
    ({"type": "integer"}, "123_456", 123456),
    ({"type": "integer"}, "", ""),
    ({"type": "integer"}, "1" * 5000, "1" * 5000),
    ({"type": "number"}, "3.14", 3.14),
    ({"type": "number"}, "1.25e2", 125.0),
    ({"type": "number"}, "7", 7),
    ({"type": "number"}, '"1.5"', 1.5),
    ({"type": "number"}, '"1e5"', 1e5),
    ({"type": "number"}, '"nan"', "nan"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number", "enum": [1, 2]}, '"1"', 1),
    ({"type": "number", "enum": [1, 2]}, r"\"1\"", 1),
    ({"type": ["integer", "null"]}, '"5"', 5),
    ({"type": ["integer", "null"]}, "null", None),
    # Objects, arrays, booleans and null: JSON, un-escaped JSON, Python, else the text.
    ({"type": "object"}, '{"k": 1}', {"k": 1}),
    ({"type": "object"}, r"{\"k\": 1}", {"k": 1}),
    ({"type": "object"}, "{'a': 1, 'b': None}", {"a": 1, "b": None}),
    ({"type": "object"}, r"{'pattern': '\d+'}", {"pattern": r"\d+"}),
    ({"type": "object"}, "{'a', 'b'}", "{'a', 'b'}"),
    ({"type": "object"}, "{'a': b'x'}", "{'a': b'x'}"),
    ({"type": "object"}, "{broken", "{broken"),
    ({"type": "array"}, "[1, 2]", [1, 2]),
    ({"type": "array"}, "[]", []),
    ({"type": "array"}, "1, 2", [1, 2]),
    ({"type": "array"}, "('a', 'b')", ["a", "b"]),
    ({"type": "array"}, "plain", "plain"),
    ({"type": "array"}, "[" * 50_000, "[" * 50_000),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": "null"}, "null", None),
    ({"type": ["null"]}, "None", None),
    ({"const": 7}, "7", 7),
    ({"const": {"ok": False}}, '{"ok": false}', {"ok": False}),
    ({"oneOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}}]}, "[1, 2]", [1, 2]),
    # Unions with strings: what the schema admits of the JSON, else the text.
    (OPTIONAL_TEXT, "sk-1", "sk-1"),
    (OPTIONAL_TEXT, "null", None),
    (OPTIONAL_TEXT, '"null"', "null"),
    (OPTIONAL_TEXT, "7", "7"),
    ({"type": ["string", "null"]}, "test message", "test message"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"], "enum": ["ok", None]}, "null", None),
    ({"type": ["string", "null"], "enum": ["ok", None]}, "ok", "ok"),
    ({"enum": ["ok", None]}, "null", None),
    ({"type": ["integer", "string"]}, "auto", "auto"),
    ({"type": ["string", "integer"]}, "7", 7),
    ({"type": ["string", "integer"]}, "true", "true"),
    ({"type": ["string", "integer"]}, "null", "null"),
    ({"type": ["number", "string"]}, "auto", "auto"),
    ({"type": ["number", "string"], "enum": [1, "auto"]}, "1", 1),
    ({"type": ["number", "string"], "enum": [1, "auto"]}, "1.0", 1.0),
    ({"type": ["string", "object"]}, "7", "7"),
    ({"type": ["string", "object"]}, '{"ok": false}', {"ok": False}),
    ({"type": ["string", "object"]}, r"{\"ok\": true}", {"ok": True}),
    ({"type": ["string", "object"]}, r"\"a\"", r"\"a\""),
    ({"type": ["string", "array"]}, "1e2", "1e2"),
    ({"type": ["string", "boolean"]}, "false", False),
    ({"type": ["string", "boolean"]}, "auto", "auto"),
    ({"enum": ["7", 8]}, "7", "7"),
    ({"enum": ["7", 8]}, "8", 8),
    ({"enum": ["7", None]}, "7", "7"),
    ({"enum": ["7", False]}, "7", "7"),
    ({"enum": ["true", 7]}, "true", "true"),
    ({"enum": [1, "x"]}, "true", "true"),
    ({"anyOf": [{"type": "string", "enum": ["auto"]}, {"type": "integer"}]}, "7", 7),
    ({"anyOf": [{"type": "string", "enum": ["auto"]}, {"type": "integer"}]}, "auto", "auto"),
    ({"oneOf": [{"type": "string"}, {"type": "object"}]}, "7", "7"),
    # Nothing said: JSON or the text.
    ({}, "42", 42),
    ({}, "-123", -123),
    ({}, "1.5", 1.5),
    ({}, "true", True),
    ({}, "True", "True"),
    ({}, "123abc", "123abc"),
    ({}, "123_456", "123_456"),
    ({}, "+49123", "+49123"),
    ({}, "hello world", "hello world"),
    ({}, "北京", "北京"),
    ({}, "", ""),
    ({}, "{'a': 1}", "{'a': 1}"),
    ({}, '{"ok": false}', {"ok": False}),
    (True, "42", 42),
    ("nonsense", "42", 42),
    ({"type": "any"}, "42", 42),
    ({"type": 5, "enum": "x"}, "42", 42),
]


def read(parameters, *pairs):
    """Arguments of a call at every chunk size, which must agree."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    case = Case("", call("f", *pairs), tools=tools)
    wholes = {collect(fed_text(case.parser(None), case.text, size)).tool_calls[0].arguments for size in CHUNK_SIZES}
    assert len(wholes) == 1
    return json.loads(wholes.pop())


@pytest.mark.parametrize(("schema", "text", "expected"), VALUES, ids=lambda value: str(value)[:40])
def test_value(schema, text, expected):
    arguments = Arguments({"type": "object", "properties": {"value": schema}})
    written = arguments.read("value", text)
    assert json.dumps(json.loads(written)) == json.dumps(expected)
    if arguments.is_text("value"):
        assert json.loads(written) == text  # so its pieces may go out before the value is complete


def test_values_in_calls():
    """The same through the parser, where values are in one call and arrive in pieces."""
    short = [(schema, text, expected) for schema, text, expected in VALUES if len(text) < 100]
    properties = {f"k{i}": schema for i, (schema, _, _) in enumerate(short)}
    got = read({"properties": properties}, *[(f"k{i}", text) for i, (_, text, _) in enumerate(short)])
    assert json.dumps(got) == json.dumps({f"k{i}": expected for i, (_, _, expected) in enumerate(short)})


def test_unknown_key_and_unknown_schema():
    assert read({"properties": {"a": {"type": "string"}}}, ("b", "42"), ("c", "x")) == {"b": 42, "c": "x"}
    assert read(None, ("b", "42")) == {"b": 42}
    assert read({"properties": "nonsense"}, ("b", "42")) == {"b": 42}


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_local_references(place):
    for text, field, expected in [
        ("7", {"type": "integer"}, 7),
        ('{"ok": false}', {"type": "object"}, {"ok": False}),
        ("null", {"type": "string"}, "null"),
    ]:
        schema = {place: {"a/b~c": field}, "properties": {"value": {"$ref": f"#/{place}/a~1b~0c"}}}
        assert read(schema, ("value", text)) == {"value": expected}
    in_list = {place: {"x": [{"type": "integer"}, {"type": "string"}]}}
    assert read(in_list | {"properties": {"v": {"$ref": f"#/{place}/x/1"}}}, ("v", "7")) == {"v": "7"}


def test_references_of_the_root_and_to_nowhere():
    text = {"$defs": {"args": {"properties": {"value": {"type": "string"}}}}, "$ref": "#/$defs/args"}
    assert read(text, ("value", "null")) == {"value": "null"}
    for reference in ("#/nowhere", "#/$defs/args/7", "https://example.org/x", "#/$defs/list/9", 7):
        schema = {"$defs": {"list": [1]}, "properties": {"value": {"$ref": reference}}}
        assert read(schema, ("value", "7")) == {"value": 7}


def test_cycles_end():
    cycle = {"$defs": {"c": {"$ref": "#/$defs/c"}}, "properties": {"value": {"$ref": "#/$defs/c"}}}
    assert read(cycle, ("value", "auto")) == {"value": "auto"}
    tree = {"anyOf": [{"type": "null"}, {"$ref": "#"}], "properties": {"value": {"$ref": "#"}}}
    assert read(tree, ("value", "null")) == {"value": None}
    nested: dict = {"type": "integer"}
    for _ in range(5000):
        nested = {"allOf": [nested]}
    assert read({"properties": {"value": nested}}, ("value", "7")) == {"value": 7}


def test_shared_branches_cost_no_more_than_once():
    """2**30 ways through, 30 nodes: each is worked out once."""
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    schema = {"$defs": defs | {"d30": {"type": "integer"}}, "properties": {"value": {"$ref": "#/$defs/d0"}}}
    assert read(schema, ("value", '"7"')) == {"value": 7}
    ways = Schema(None).alternatives(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(9)]} for i in range(9)]}
    )
    assert len(ways) == MAX_ALTERNATIVES


def test_a_schema_that_holds_twice_holds_once():
    """2**17 times, written out."""
    for key in ("allOf", "anyOf"):
        defs = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(17)}
        schema = {"$defs": defs | {"d17": {"properties": {"value": {"type": "string"}}}}, "$ref": "#/$defs/d0"}
        (way,) = Schema(schema).alternatives(schema)
        assert len(way["value"]) == 1


def branching(depth: int) -> dict:
    """All branches are different, as are those of them."""
    defs = {}
    for i in range(depth):
        defs |= {f"{name}{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/b{i + 1}"}],
                                "properties": {f"{name}{i}": {}}} for name in "ab"}  # fmt: skip
    return {"$defs": defs | {f"a{depth}": {}, f"b{depth}": {}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{i}": {} for i in range(2000)}, "anyOf": [{"title": str(i)} for i in range(64)]},
        {"properties": {"value": {"enum": list(range(MAX_STEPS))}}},
        {"properties": {"value": {"type": ["string"] * MAX_STEPS}}},
        {"properties": {"value": {"anyOf": [{"$ref": "#/$defs/x"}] * MAX_STEPS}}, "$defs": {"x": {}}},
        {"properties": {f"p{i}": {} for i in range(MAX_STEPS)}},
    ],
    ids=["properties times ways", "enum", "types", "union", "properties"],
)
def test_what_takes_too_many_steps_is_refused(schema):
    with pytest.raises(RequestError, match=f"parameters of 'f' need too many steps.*tools together: {MAX_STEPS}") as it:
        Functions([{"name": "f", "parameters": schema}])
    assert it.value.param == "tools"


def test_all_tools_together_have_one_budget():
    tools = [{"name": f"f{i}", "parameters": {"properties": {f"p{j}": {} for j in range(1000)}}} for i in range(40)]
    assert len(Functions(tools[:20])) == 20
    with pytest.raises(RequestError, match="too many steps"):
        Functions(tools)


def test_branches_that_meet_again_are_read_once():
    """2**60 ways through 120 nodes."""
    functions = Functions([{"name": "f", "parameters": branching(60)}])
    assert functions["f"].read("a0", "7") == "7"


TEXT = {"properties": {"kind": {"const": "text"}, "value": {"type": "string"}}}
COUNT = {"properties": {"kind": {"enum": ["count"]}, "value": {"type": "integer"}}}
FLIPPED = [COUNT, TEXT]


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [TEXT, COUNT]},
        {"oneOf": FLIPPED},
        {"oneOf": [{"allOf": [branch]} for branch in FLIPPED]},
        {"$defs": {"0": TEXT, "1": COUNT}, "anyOf": [{"$ref": "#/$defs/1"}, {"$ref": "#/$defs/0"}]},
        {"allOf": [{"oneOf": FLIPPED}, {"required": ["kind"]}]},
    ],
    ids=["anyOf", "oneOf", "allOf in oneOf", "$ref", "oneOf in allOf"],
)
def test_unions_that_need_the_other_arguments(schema):
    """The value's type depends on its sibling, in whichever order they come."""
    for pairs in ([("kind", "text"), ("value", "7")], [("value", "7"), ("kind", "text")]):
        assert read(schema, *pairs) == {"kind": "text", "value": "7"}
    for pairs in ([("kind", "count"), ("value", "7")], [("value", "7"), ("kind", "count")]):
        assert read(schema, *pairs) == {"kind": "count", "value": 7}
    assert read(schema, ("kind", "text"), ("value", "auto")) == {"kind": "text", "value": "auto"}
    assert read(schema, ("kind", "neither"), ("value", "x")) == {"kind": "neither", "value": "x"}
    assert read(schema) == {}


def test_only_dependent_arguments_wait():
    assert Arguments({"anyOf": [TEXT, COUNT]}).depend_on_each_other
    assert not Arguments({"allOf": [COUNT, {"required": ["kind", "value"]}]}).depend_on_each_other
    apart = {"anyOf": [{"properties": {"path": {"type": "string"}}}, {"properties": {"url": {"type": "string"}}}]}
    assert not Arguments(apart).depend_on_each_other
    assert Arguments(apart).is_text("path")
    only_required = {"properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert not Arguments(only_required).depend_on_each_other


def test_valid_json_is_passed_on_as_it_is():
    """No number loses digits, no escape is rewritten."""
    for text in ("0.1000000000000000055511151231257827", '{"a":1,  "b":"\\u00e9"}', '["\\ud83d"]', "1e400"):
        assert Arguments({"properties": {"v": {"type": ["object", "array", "number"]}}}).read("v", text) == text


def test_half_a_surrogate_stays_escaped():
    written = Arguments({"properties": {"v": {"type": "object"}}}).read("v", "{'a': '\\ud83d'}")
    assert json.loads(written) == {"a": "\ud83d"}
    written.encode()


def test_long_text_is_not_tried_as_python():
    long = "[" + "'a', " * (MAX_LITERAL // 5) + "]"
    assert json.loads(Arguments({"properties": {"v": {"type": "array"}}}).read("v", long)) == long


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read({"properties": {"v": {"type": "object"}}}, ("v", r"{'a': '\C|\.'}")) == {"v": {"a": r"\C|\."}}
        assert read({"properties": {"v": {"type": "integer"}}}, ("v", "1or 2")) == {"v": "1or 2"}


def test_json_types_and_equality():
    assert [json_type(v) for v in (None, True, 1, 1.0, 1.5, "", [], {})] == [
        "null", "boolean", "integer", "integer", "number", "string", "array", "object",
    ]  # fmt: skip
    assert json_equal({"a": [1, {"b": 1.0}]}, {"a": [1.0, {"b": 1}]})
    assert not json_equal(True, 1)
    assert not json_equal([1], [1, 2])
    assert not json_equal({"a": 1}, {"b": 1})
