"""Answers as a model writes them, and what they mean: the cases that other engines' parsers are tested with."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.chat import Event, OutputParser, Parsed, Tokenizer, collect

CHUNK_SIZES = (1, 2, 3, 5, 7, 10**9)


def function(name: str, **properties: Any) -> dict[str, Any]:
    """A tool with these properties, each a schema or a type name."""
    schemas = {key: {"type": value} if isinstance(value, str) else value for key, value in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schemas}}}


TOOLS = [
    function("get_weather", city="string", date="string"),
    {"type": "function", "function": {"name": "get_current_date", "parameters": {}}},
    function("calculate", operation="string", a="number", b="number", enabled="boolean"),
    function("send_message", message="string", recipient="string"),
    function("apply_diff", old_string="string", new_string="string"),
    function("todo_write", todos="array"),
    function("configure", enabled="boolean", api_key={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    function("untyped"),
]
# The same as the Responses API writes them.
BARE_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def call(name: str, *pairs: tuple[str, str], line_breaks: bool = False) -> str:
    """A call in GLM-4.7's form, or with GLM-4.5's line breaks."""
    nl = "\n" if line_breaks else ""
    body = "".join(f"<arg_key>{key}</arg_key>{nl}<arg_value>{value}</arg_value>{nl}" for key, value in pairs)
    return f"<tool_call>{name}{nl}{body}</tool_call>"


@dataclass(frozen=True)
class Case:
    """`calls`: name and arguments of each, as a value, or as text where the call was cut off."""

    name: str
    text: str
    content: str | None = None
    calls: Sequence[tuple[str, Any]] = ()
    reasoning: str | None = None
    starts_in_reasoning: bool = False
    parse_tools: bool = True
    only_offered: bool = False
    tools: list[dict[str, Any]] = field(default_factory=lambda: TOOLS)

    def check(self, parsed: Parsed) -> None:
        assert parsed.reasoning == self.reasoning
        assert parsed.content == self.content
        assert [call.name for call in parsed.tool_calls] == [name for name, _ in self.calls]
        for got, (_, expected) in zip(parsed.tool_calls, self.calls, strict=True):
            if isinstance(expected, str):
                assert (got.arguments, got.complete) == (expected, False)
            else:
                assert got.complete
                # json.dumps tells 1 from 1.0 and from true, which == does not.
                assert json.dumps(json.loads(got.arguments)) == json.dumps(expected)
        assert parsed.complete == all(got.complete for got in parsed.tool_calls)

    def parser(self, tokenizer: Tokenizer | None) -> OutputParser:
        return OutputParser(
            tokenizer,
            self.tools,
            reasoning=self.starts_in_reasoning,
            parse_tools=self.parse_tools,
            only_offered=self.only_offered,
        )


BEIJING = call("get_weather", ("city", "Beijing"))
TWO_CALLS = BEIJING + call("get_weather", ("city", "Shanghai"))
TODO = '[{"id": "1", "task": "%s", "status": "pending"}]'

TOOL_CASES = [
    Case("no call", "This is a plain response.", "This is a plain response."),
    Case("no arguments", call("get_current_date"), None, [("get_current_date", {})]),
    Case("no arguments, line break", call("get_current_date", line_breaks=True), None, [("get_current_date", {})]),
    Case("arguments on one line", BEIJING, None, [("get_weather", {"city": "Beijing"})]),
    Case(
        "arguments on lines",
        call("get_weather", ("city", "Beijing"), ("date", "2025-08-01"), line_breaks=True),
        None,
        [("get_weather", {"city": "Beijing", "date": "2025-08-01"})],
    ),
    Case(
        "indented",
        "<tool_call>get_weather\n    <arg_key>city</arg_key>\n    <arg_value>Dallas</arg_value>\n    </tool_call>",
        None,
        [("get_weather", {"city": "Dallas"})],
    ),
    Case(
        "literal backslash n between key and value",
        r"<tool_call>get_weather<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value></tool_call>",
        None,
        [("get_weather", {"city": "Beijing"})],
    ),
    Case(
        "spaces around name and key",
        "<tool_call> get_weather \n<arg_key> city </arg_key><arg_value>B</arg_value></tool_call>",
        None,
        [("get_weather", {"city": "B"})],
    ),
    Case("content before", "Checking." + call("get_current_date"), "Checking.", [("get_current_date", {})]),
    Case("white space before is no content", "  \n  " + call("get_current_date"), None, [("get_current_date", {})]),
    Case("two calls", TWO_CALLS, None, [("get_weather", {"city": c}) for c in ("Beijing", "Shanghai")]),
    Case(
        "white space between calls is no content",
        BEIJING + "\n" + BEIJING + "\n",
        None,
        [("get_weather", {"city": "Beijing"})] * 2,
    ),
    Case(
        "content before, between and after",
        "First.\n" + BEIJING + "\nAlso:\n" + BEIJING + "\nDone.",
        "First.\n\nAlso:\n\nDone.",
        [("get_weather", {"city": "Beijing"})] * 2,
    ),
    Case("content after", BEIJING + " and that is it", " and that is it", [("get_weather", {"city": "Beijing"})]),
    Case(
        "think tags in content",
        "<think>I want it.</think>\n\nI will.\n" + BEIJING,
        "<think>I want it.</think>\n\nI will.\n",
        [("get_weather", {"city": "Beijing"})],
    ),
    Case("stray end of call", "one</tool_call> two", "one two"),
    Case("stray end after a call", BEIJING + "</tool_call>", None, [("get_weather", {"city": "Beijing"})]),
    Case("comparison signs", "a < b and c > d. done", "a < b and c > d. done"),
    Case("beginning of a tag at the end", "so a <tool_ca", "so a <tool_ca"),
    Case("tag-like text", "<tool_calls> </tool> <arg_key>", "<tool_calls> </tool> <arg_key>"),
    Case(
        "a tool that was not offered",
        "x" + call("other", ("city", "Beijing"), ("n", "3")) + "y",
        "xy",
        [("other", {"city": "Beijing", "n": 3})],
    ),
    Case("only the beginning of a name", call("get", ("city", "Beijing")), None, [("get", {"city": "Beijing"})]),
    Case(
        "not offered, between offered ones",
        BEIJING + call("nope", ("a", "1")) + BEIJING,
        None,
        [("get_weather", {"city": "Beijing"}), ("nope", {"a": 1}), ("get_weather", {"city": "Beijing"})],
    ),
    Case(
        "only offered tools",
        "x" + call("other", ("city", "Beijing")) + BEIJING + "<tool_call>nothing</tool_call>",
        "x<tool_call>other<arg_key>city</arg_key><arg_value>Beijing</arg_value><tool_call>nothing</tool_call>",
        [("get_weather", {"city": "Beijing"})],
        only_offered=True,
    ),
    Case(
        "bare tools",
        BEIJING + call("get", ("a", "b")),
        "<tool_call>get<arg_key>a</arg_key><arg_value>b</arg_value>",
        [("get_weather", {"city": "Beijing"})],
        tools=BARE_TOOLS,
        only_offered=True,
    ),
    Case(
        "no tools: any name, untyped",
        call("anything", ("n", "3"), ("s", "x")),
        None,
        [("anything", {"n": 3, "s": "x"})],
        tools=[],
    ),
    Case("empty call", "a<tool_call></tool_call>b", "a<tool_call></tool_call>b"),
    Case("only an empty call", "<tool_call></tool_call>", "<tool_call></tool_call>"),
    Case("pairs without a name", call("", ("a", "1")), "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value>"),
    Case("white space for a name", "<tool_call>   ", "<tool_call>   "),
    Case("cut off in the name", "Let me<tool_call>get_wea", "Let me<tool_call>get_wea"),
    Case(
        "a call begins in a name",
        "the <tool_call> tag: " + BEIJING,
        "the <tool_call> tag: ",
        [("get_weather", {"city": "Beijing"})],
    ),
    Case("cut off after the key", "<tool_call>get_weather<arg_key>city</arg_key>", None, [("get_weather", "{")]),
    Case(
        "cut off in a value",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bei",
        None,
        [("get_weather", '{"city": "Bei')],
    ),
    Case(
        "cut off in a typed value", "<tool_call>calculate<arg_key>a</arg_key><arg_value>4", None, [("calculate", "{")]
    ),
    Case(
        "missing end of call",
        call("get_weather", ("city", "Beijing")).removesuffix("</tool_call>"),
        None,
        [("get_weather", '{"city": "Beijing"')],
    ),
    Case(
        "a call begins in a call",
        BEIJING.removesuffix("</tool_call>") + BEIJING,
        None,
        [("get_weather", {"city": "Beijing"})] * 2,
    ),
    Case(
        "a call begins in a pair",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a</arg_value><arg_key>date" + BEIJING,
        None,
        [("get_weather", {"city": "a"}), ("get_weather", {"city": "Beijing"})],
    ),
    Case(
        "malformed pair",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Seattle</arg_value>\n<arg_key>incomplete_arg\n"
        "<arg_value>value</arg_value>\n</tool_call>",
        None,
        [("get_weather", {"city": "Seattle", "incomplete_arg": "value"})],
    ),
    Case(
        "key without value",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_key>date</arg_key><arg_value>d</arg_value></tool_call>",
        None,
        [("get_weather", {"date": "d"})],
    ),
    Case("only a key", "<tool_call>get_weather<arg_key>city</arg_key></tool_call>", None, [("get_weather", {})]),
    Case(
        "text between pairs is dropped",
        "<tool_call>get_weather<arg_key>city</arg_key>: <arg_value>B</arg_value>, "
        "<arg_key>date</arg_key><arg_value>d</arg_value>;</tool_call>",
        None,
        [("get_weather", {"city": "B", "date": "d"})],
    ),
    Case(
        "duplicate key: the last wins",
        call("get_weather", ("city", "a"), ("city", "b")),
        None,
        [("get_weather", {"city": "b"})],
    ),
    Case(
        "white space in values",
        call("apply_diff", ("old_string", "    indented"), ("new_string", "\n\tx  ")),
        None,
        [("apply_diff", {"old_string": "    indented", "new_string": "\n\tx  "})],
    ),
    Case(
        "quotes and line breaks",
        call("send_message", ("message", 'Hello "world"\nNew \\ line')),
        None,
        [("send_message", {"message": 'Hello "world"\nNew \\ line'})],
    ),
    Case(
        "signs in values",
        call("send_message", ("message", "a<b & c > d </arg_val x")),
        None,
        [("send_message", {"message": "a<b & c > d </arg_val x"})],
    ),
    Case(
        "tags in values",
        call("send_message", ("message", "<tool_call>f</tool_call><think>")),
        None,
        [("send_message", {"message": "<tool_call>f</tool_call><think>"})],
    ),
    Case(
        "unicode",
        call("send_message", ("message", "你好世界 🎉"), ("recipient", "Zoë")),
        None,
        [("send_message", {"message": "你好世界 🎉", "recipient": "Zoë"})],
    ),
    Case("empty string", call("send_message", ("message", "")), None, [("send_message", {"message": ""})]),
    Case(
        "digits of a string",
        call("get_weather", ("city", "42"), ("date", "123_456")),
        None,
        [("get_weather", {"city": "42", "date": "123_456"})],
    ),
    Case(
        "numbers and booleans",
        call("calculate", ("operation", "add"), ("a", "42"), ("b", "3.14"), ("enabled", "true")),
        None,
        [("calculate", {"operation": "add", "a": 42, "b": 3.14, "enabled": True})],
    ),
    Case(
        "numbers on lines",
        call("calculate", ("a", "42"), ("b", "3.14"), line_breaks=True),
        None,
        [("calculate", {"a": 42, "b": 3.14})],
    ),
    Case(
        "untyped",
        call("untyped", ("a", "42"), ("b", "x y"), ("c", "true"), ("d", '{"e": [1]}')),
        None,
        [("untyped", {"a": 42, "b": "x y", "c": True, "d": {"e": [1]}})],
    ),
    Case(
        "array",
        call("todo_write", ("todos", TODO % "it")),
        None,
        [("todo_write", {"todos": [{"id": "1", "task": "it", "status": "pending"}]})],
    ),
    Case(
        "escaped array",
        call("todo_write", ("todos", (TODO % "it").replace('"', r"\""))),
        None,
        [("todo_write", {"todos": [{"id": "1", "task": "it", "status": "pending"}]})],
    ),
    Case(
        "Windows path",
        call("todo_write", ("todos", TODO % r"C:\\Users\\test.txt")),
        None,
        [("todo_write", {"todos": [{"id": "1", "task": r"C:\Users\test.txt", "status": "pending"}]})],
    ),
    Case(
        "literal backslash n",
        call("todo_write", ("todos", TODO % r"Print \\n")),
        None,
        [("todo_write", {"todos": [{"id": "1", "task": r"Print \n", "status": "pending"}]})],
    ),
    Case("quoted pattern", call("get_weather", ("city", r'"\C|\."')), None, [("get_weather", {"city": r'"\C|\."'})]),
    Case(
        "optional string",
        call("configure", ("api_key", "sk-12345678")),
        None,
        [("configure", {"api_key": "sk-12345678"})],
    ),
    Case("optional string, null", call("configure", ("api_key", "null")), None, [("configure", {"api_key": None})]),
    Case("boolean", call("configure", ("enabled", "true")), None, [("configure", {"enabled": True})]),
    Case(
        "Python's booleans",
        call("configure", ("enabled", "True")) + call("configure", ("enabled", "False")),
        None,
        [("configure", {"enabled": True}), ("configure", {"enabled": False})],
    ),
    Case("tools not parsed", "a" + BEIJING + "b", "a" + BEIJING + "b", parse_tools=False),
]

REASONING_CASES = [
    Case(
        "open tag",
        "<think>This is a reasoning section</think>This is the rest",
        "This is the rest",
        reasoning="This is a reasoning section",
        starts_in_reasoning=True,
    ),
    Case("no open tag", "Reasons</think>The rest", "The rest", reasoning="Reasons", starts_in_reasoning=True),
    Case("no tags: all of it is reasoning", "This is the rest", reasoning="This is the rest", starts_in_reasoning=True),
    Case("only reasoning", "<think>Reasons</think>", reasoning="Reasons", starts_in_reasoning=True),
    Case(
        "several lines",
        "<think>One\ntwo</think>The rest\nThat",
        "The rest\nThat",
        reasoning="One\ntwo",
        starts_in_reasoning=True,
    ),
    Case("empty block", "<think></think>The rest", "The rest", starts_in_reasoning=True),
    Case("empty block and nothing", "<think></think>", starts_in_reasoning=True),
    Case("nothing thought", "</think>The rest", "The rest", starts_in_reasoning=True),
    Case("only the open tag", "<think>Reasons", reasoning="Reasons", starts_in_reasoning=True),
    Case("white space is kept", "\n r \n</think>\n\nc \n", "\n\nc \n", reasoning="\n r \n", starts_in_reasoning=True),
    Case("a later open tag is text", "a <think> b</think>c", "c", reasoning="a <think> b", starts_in_reasoning=True),
    Case("a later end tag is dropped", "a</think>b</think>c", "bc", reasoning="a", starts_in_reasoning=True),
    Case(
        "an open tag in the content is text", "a</think>b<think>c", "b<think>c", reasoning="a", starts_in_reasoning=True
    ),
    Case(
        "a call ends the reasoning",
        "Thinking" + BEIJING,
        None,
        [("get_weather", {"city": "Beijing"})],
        reasoning="Thinking",
        starts_in_reasoning=True,
    ),
    Case(
        "an end tag after such a call",
        "Thinking" + BEIJING + "</think>x",
        "x",
        [("get_weather", {"city": "Beijing"})],
        reasoning="Thinking",
        starts_in_reasoning=True,
    ),
    Case("a call at once", BEIJING, None, [("get_weather", {"city": "Beijing"})], starts_in_reasoning=True),
    Case(
        "a call ends the reasoning where calls are text",
        "T<tool_call>f</tool_call>",
        "<tool_call>f</tool_call>",
        reasoning="T",
        starts_in_reasoning=True,
        parse_tools=False,
    ),
    Case(
        "reasoning, content, call",
        "R</think>C" + BEIJING,
        "C",
        [("get_weather", {"city": "Beijing"})],
        reasoning="R",
        starts_in_reasoning=True,
    ),
    Case("beginning of a tag at the end", "a < b </thin", reasoning="a < b </thin", starts_in_reasoning=True),
    Case("beginning of the open tag", "<thi", reasoning="<thi", starts_in_reasoning=True),
    Case("disabled: all of it is content", "<think>a</think>b", "<think>a</think>b", parse_tools=False),
    Case("disabled, no tags", "This is content", "This is content"),
]

CASES = TOOL_CASES + REASONING_CASES


def fed_text(parser: OutputParser, text: str, size: int) -> list[Event]:
    """Events of text that arrives without tokens, `size` characters at a time."""
    events = [event for i in range(0, len(text), size) for event in parser.feed(None, text[i : i + size])]
    return events + parser.finish()


def fed_ids(parser: OutputParser, tokenizer: Tokenizer, ids: Sequence[int], size: int = 1, *, hide: bool = False):
    """Events of tokens, of which `size` at a time show their text, with the last of them; tags show theirs at once.

    `hide`: the text of tags is left out, as engines do with special tokens.
    """
    events: list[Event] = []
    for group in _groups(tokenizer, ids, size):
        stream = tokenizer.stream()
        *texts, last = [stream.feed(token_id) for token_id in group]
        if hide and tokenizer.decode(group[-1:]) in tokenizer.control_spellings:
            last = ""
        for token_id in group[:-1]:
            events += parser.feed(token_id, "")
        events += parser.feed(group[-1], "".join([*texts, last]) + stream.finish())
    return events + parser.finish()


def _groups(tokenizer: Tokenizer, ids: Sequence[int], size: int) -> Iterator[list[int]]:
    """Whole characters, at least `size` tokens but where a tag ends a group."""
    group: list[int] = []
    stream = tokenizer.stream()
    for token_id in ids:
        group.append(token_id)
        stream.feed(token_id)
        whole = not tokenizer.decode(group).endswith("\ufffd")
        if whole and (len(group) >= size or tokenizer.decode([token_id]) in tokenizer.control_spellings):
            yield group
            group = []
    if group:
        yield group


def parsed_text(case: Case, size: int) -> Parsed:
    return collect(fed_text(case.parser(None), case.text, size))
