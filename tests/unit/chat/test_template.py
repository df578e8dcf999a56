"""What each bundled template renders: the published rules, word for word."""

import pytest

from glm5.chat import BUNDLED, ChatTemplate
from tests.support.conversations import (
    EMBEDDED,
    MIXED_TURN,
    NO_REASONING,
    OUTPUTS,
    PARTS,
    REFERENCES,
    SYSTEM,
    SYSTEM_LATER,
    TOOL_FIRST,
    TOOL_LOOP,
    TOOLS,
    TWO_TURNS,
    UNUSUAL_ARGUMENTS,
    assistant,
    called,
    result,
    user,
)

START = "[gMASK]<sop>"
MAX = "[gMASK]<sop><|system|>Reasoning Effort: Max"
TOOLS_TOP = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
    "function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_END = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}"
    "</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)
WEATHER = (
    '"description": "Wetter <für> 北京 & co", "parameters": {"type": "object", "properties": {"city": '
    '{"type": "string", "enum": ["北京", null, 1.5]}}}}'
)
TOOLS_WHOLE = (
    TOOLS_TOP
    + '{"type": "function", "function": {"name": "get_weather", "strict": true, '
    + WEATHER
    + '}\n{"type": "function", "function": {"name": "rare", "defer_loading": true, '
    + '"description": "loaded on demand"}}\n'
    + TOOLS_END
)
TOOLS_INNER = TOOLS_TOP + '{"name": "get_weather", ' + WEATHER + "\n" + TOOLS_END
CALLS = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>北京</arg_value><arg_key>n</arg_key><arg_value>3</arg_value>"
    "<arg_key>ok</arg_key><arg_value>true</arg_value></tool_call><tool_call>get_weather</tool_call>"
)
RB, RA = "<tool_response>rb</tool_response>", "<tool_response>ra</tool_response>"
ASK = "<|assistant|><think>"


def render(name, messages, tools=None, **kwargs):
    return ChatTemplate.bundled(name).render(messages, tools, **kwargs)


HELLO = [user("Hello")]
CASES = [
    # Thinking on and off, and the effort line.
    ("glm-5", HELLO, {}, START + "<|user|>Hello" + ASK),
    ("glm-5", HELLO, {"enable_thinking": False}, START + "<|user|>Hello<|assistant|></think>"),
    ("glm-5.1", HELLO, {}, START + "<|user|>Hello" + ASK),
    ("glm-5.1", HELLO, {"enable_thinking": False}, START + "<|user|>Hello<|assistant|></think>"),
    ("glm-5.1", HELLO, {"reasoning_effort": "high"}, START + "<|user|>Hello" + ASK),
    ("glm-5.2", HELLO, {}, MAX + "<|user|>Hello" + ASK),
    ("glm-5.2", HELLO, {"enable_thinking": False}, START + "<|user|>Hello<|assistant|><think></think>"),
    ("glm-5.2", HELLO, {"thinking": False}, START + "<|user|>Hello<|assistant|><think></think>"),
    ("glm-5.2", HELLO, {"enable_thinking": None, "reasoning_effort": None}, MAX + "<|user|>Hello" + ASK),
    ("glm-5.2", HELLO, {"reasoning_effort": "high"}, MAX.replace("Max", "High") + "<|user|>Hello" + ASK),
    ("glm-5.2", HELLO, {"reasoning_effort": "low"}, MAX + "<|user|>Hello" + ASK),
    ("glm-5.2", HELLO, {"reasoning_effort": "high", "enable_thinking": False},
     START + "<|user|>Hello<|assistant|><think></think>"),
    ("glm-5.3", HELLO, {}, MAX + "<|user|>Hello" + ASK),
    ("glm-5.3", HELLO, {"reasoning_effort": "low"}, MAX.replace("Max", "Low") + "<|user|>Hello" + ASK),
    ("glm-5.3", HELLO, {"reasoning_effort": "high"}, MAX.replace("Max", "High") + "<|user|>Hello" + ASK),
    ("glm-5.3", HELLO, {"reasoning_effort": "minimal"}, MAX + "<|user|>Hello" + ASK),
    # Reasoning of earlier turns: cleared, or preserved.
    ("glm-5", TWO_TURNS, {}, START + "<|user|>u1<|assistant|></think>a1<|user|>u2" + ASK),
    ("glm-5", TWO_TURNS, {"clear_thinking": False},
     START + "<|user|>u1<|assistant|><think>r1</think>a1<|user|>u2" + ASK),
    ("glm-5.1", TWO_TURNS, {}, START + "<|user|>u1<|assistant|></think>a1<|user|>u2" + ASK),
    ("glm-5.1", TWO_TURNS, {"clear_thinking": False},
     START + "<|user|>u1<|assistant|><think>r1</think>a1<|user|>u2" + ASK),
    ("glm-5.2", TWO_TURNS, {}, MAX + "<|user|>u1<|assistant|><think></think>a1<|user|>u2" + ASK),
    ("glm-5.2", TWO_TURNS, {"clear_thinking": True}, MAX + "<|user|>u1<|assistant|><think></think>a1<|user|>u2" + ASK),
    ("glm-5.2", TWO_TURNS, {"clear_thinking": False},
     MAX + "<|user|>u1<|assistant|><think>r1</think>a1<|user|>u2" + ASK),
    ("glm-5.3", TWO_TURNS, {}, MAX + "<|user|>u1<|assistant|><think>r1</think>a1<|user|>u2" + ASK),
    ("glm-5.3", TWO_TURNS, {"clear_thinking": True}, MAX + "<|user|>u1<|assistant|><think></think>a1<|user|>u2" + ASK),
    # Answers without reasoning; contents are stripped.
    ("glm-5", NO_REASONING, {}, START + "<|user|>u1<|assistant|></think>a1<|user|>u2<|assistant|></think>a2" + ASK),
    ("glm-5.1", NO_REASONING, {},
     START + "<|user|>u1<|assistant|></think>a1<|user|>u2<|assistant|><think></think>a2" + ASK),
    ("glm-5.1", NO_REASONING, {"enable_thinking": False},
     START + "<|user|>u1<|assistant|></think>a1<|user|>u2<|assistant|></think>a2<|assistant|></think>"),
    ("glm-5.1", NO_REASONING, {"clear_thinking": False},
     START + "<|user|>u1<|assistant|></think>a1<|user|>u2<|assistant|><think></think>a2" + ASK),
    ("glm-5.2", NO_REASONING, {},
     MAX + "<|user|>u1<|assistant|><think></think>a1<|user|>u2<|assistant|><think></think>a2" + ASK),
    ("glm-5.3", NO_REASONING, {},
     MAX + "<|user|>u1<|assistant|><think></think>a1<|user|>u2<|assistant|><think></think>a2" + ASK),
    # A user's turn in which only some answers thought (5.1 tells these apart).
    ("glm-5.1", MIXED_TURN, {"clear_thinking": False},
     START + "<|user|>u1<|assistant|><think>r</think>call<tool_call>get_weather<arg_key>city</arg_key><arg_value>x"
     "</arg_value></tool_call><|observation|><tool_response>done</tool_response><|assistant|><think></think>final"
     "<|user|>u2" + ASK),
    ("glm-5.1", MIXED_TURN, {},
     START + "<|user|>u1<|assistant|></think>call<tool_call>get_weather<arg_key>city</arg_key><arg_value>x</arg_value>"
     "</tool_call><|observation|><tool_response>done</tool_response><|assistant|></think>final<|user|>u2" + ASK),
    ("glm-5", MIXED_TURN, {"clear_thinking": False},
     START + "<|user|>u1<|assistant|><think>r</think>call<tool_call>get_weather<arg_key>city</arg_key><arg_value>x"
     "</arg_value></tool_call><|observation|><tool_response>done</tool_response><|assistant|></think>final<|user|>u2"
     + ASK),
    # Reasoning that is embedded in the content; an embedded block marks no turn.
    ("glm-5", EMBEDDED, {}, START + "<|user|>u1<|assistant|></think>a1<|user|>u2<|assistant|><think>x</think>z" + ASK),
    ("glm-5", EMBEDDED, {"clear_thinking": False},
     START + "<|user|>u1<|assistant|><think>r1</think>a1<|user|>u2<|assistant|><think>x</think>z" + ASK),
    ("glm-5.1", EMBEDDED, {"clear_thinking": False},
     START + "<|user|>u1<|assistant|><think>\nr1\n</think>a1<|user|>u2<|assistant|><think>x</think>z" + ASK),
    ("glm-5.2", EMBEDDED, {},
     MAX + "<|user|>u1<|assistant|><think></think>a1<|user|>u2<|assistant|><think>x</think>z" + ASK),
    ("glm-5", [user("u"), assistant("<think>\n</think>z")], {"add_generation_prompt": False},
     START + "<|user|>u<|assistant|></think>z"),
    # Only GLM-5 strips reasoning.
    ("glm-5", [user("u"), assistant("a", " r \n")], {"add_generation_prompt": False},
     START + "<|user|>u<|assistant|><think>r</think>a"),
    ("glm-5", [user("u"), assistant("a", "")], {"add_generation_prompt": False},
     START + "<|user|>u<|assistant|></think>a"),
    *[(name, [user("u"), assistant("a", " r \n")], {"add_generation_prompt": False},
       (START if name == "glm-5.1" else MAX) + "<|user|>u<|assistant|><think> r \n</think>a")
      for name in BUNDLED[1:]],
    # Contents in parts, None, system messages anywhere, a tool result without a call.
    *[(name, PARTS, {"clear_thinking": False}, (START if name < "glm-5.2" else MAX)
       + f"<|system|>S1<|user|>ab<|assistant|>{'<think></think>' if name > 'glm-5.1' else '</think>'}c<|user|>" + ASK)
      for name in BUNDLED],
    ("glm-5.2", [user(None), assistant(None, "r")], {}, MAX + "<|user|><|assistant|><think>r</think>" + ASK),
    ("glm-5.1", SYSTEM_LATER, {}, START + "<|user|>u1<|system|>S<|assistant|></think>a1<|system|>T<|user|>u2" + ASK),
    ("glm-5.2", TOOL_FIRST, {}, MAX + "<|observation|><tool_response>r0</tool_response><|user|>u1" + ASK),
    ("glm-5.3", TOOL_FIRST, {}, MAX + "<|observation|><tool_response>r0</tool_response><|user|>u1" + ASK),
    ("glm-5", [{"role": "developer", "content": "S"}, user("u")], {}, START + "<|system|>S<|user|>u" + ASK),
    # Values of arguments: text as it is, all else as JSON.
    ("glm-5.2", UNUSUAL_ARGUMENTS, {},
     MAX + "<|user|>u<|assistant|><think></think><tool_call>f<arg_key>s</arg_key><arg_value> <&> </arg_value><arg_key>i"
     "</arg_key><arg_value>0</arg_value><arg_key>f</arg_key><arg_value>1.5</arg_value><arg_key>n</arg_key><arg_value>"
     'null</arg_value><arg_key>b</arg_key><arg_value>false</arg_value><arg_key>o</arg_key><arg_value>{"k": ["é", {}]}'
     "</arg_value><arg_key>l</arg_key><arg_value>[]</arg_value></tool_call><|observation|><tool_response>"
     "</tool_response>" + ASK),
    # Interleaved thinking: the reasoning of a tool loop stays. The golden renders of 5.3.
    ("glm-5", TOOL_LOOP, {"tools": TOOLS},
     START + TOOLS_WHOLE + "<|system|>S<|user|>u1<|assistant|></think>a1<|user|>u2<|assistant|><think>r2</think>"
     + CALLS + "<|observation|>" + RB + RA + ASK),
    ("glm-5.1", TOOL_LOOP, {"tools": TOOLS},
     START + TOOLS_INNER + "<|system|>S<|user|>u1<|assistant|></think>a1<|user|>u2<|assistant|><think>r2</think>"
     + CALLS + "<|observation|>" + RB + RA + ASK),
    ("glm-5.2", TOOL_LOOP, {"tools": TOOLS},
     MAX + TOOLS_INNER + "<|system|>S<|user|>u1<|assistant|><think></think>a1<|user|>u2<|assistant|><think>r2</think>"
     + CALLS + "<|observation|>" + RB + RA + ASK),
    ("glm-5.3", TOOL_LOOP, {"tools": TOOLS},
     MAX + TOOLS_INNER + "<|system|>S<|user|>u1<|assistant|><think>r1</think>a1<|user|>u2<|assistant|><think>r2</think>"
     + CALLS + "<|observation|>" + RA + RB + ASK),
    ("glm-5.3", TOOL_LOOP, {"tools": TOOLS, "clear_thinking": True, "reasoning_effort": "low"},
     MAX.replace("Max", "Low") + TOOLS_INNER + "<|system|>S<|user|>u1<|assistant|><think></think>a1<|user|>u2"
     "<|assistant|><think>r2</think>" + CALLS + "<|observation|>" + RA + RB + ASK),
    ("glm-5.2", [SYSTEM, user("u")], {"tools": []}, MAX + "<|system|>S<|user|>u" + ASK),
    # References to tools are answered with their definitions, also of those that were left out.
    *[(name, REFERENCES, {"tools": TOOLS},
       (START if name == "glm-5.1" else MAX) + TOOLS_INNER
       + "<|user|>u<|assistant|><think>r</think><tool_call>search</tool_call><|observation|><tool_response><tools>\n"
       '{"name": "rare", "description": "loaded on demand"}\n</tools></tool_response>' + ASK) for name in BUNDLED[1:]],
    # Several outputs in one message.
    ("glm-5", OUTPUTS, {},
     START + "<|user|>u<|assistant|><think>r</think><tool_call>f</tool_call><tool_call>f</tool_call><|observation|>"
     "<tool_response>two</tool_response><tool_response>one</tool_response>" + ASK),
    ("glm-5.3", OUTPUTS, {},
     MAX + "<|user|>u<|assistant|><think>r</think><tool_call>f</tool_call><tool_call>f</tool_call><|observation|>"
     "<tool_response>one</tool_response><tool_response>two</tool_response>" + ASK),
]  # fmt: skip


@pytest.mark.parametrize(("name", "messages", "kwargs", "expected"), CASES)
def test_render(name, messages, kwargs, expected):
    assert render(name, messages, **kwargs) == expected


def test_no_generation_prompt():
    assert render("glm-5.3", TWO_TURNS, add_generation_prompt=False).endswith("<|user|>u2")


ONE, TWO = [called("f", "1"), called("f", "2")], [called("f", "1"), called("f", "1")]
SHOWN = {"1": "<tool_response>one</tool_response>", "2": "<tool_response>two</tool_response>"}


@pytest.mark.parametrize(
    ("calls", "results", "order"),
    [
        (ONE, [("two", "2"), ("one", "1")], ["1", "2"]),
        (ONE, [("one", "1"), ("two", "2")], ["1", "2"]),
        (ONE, [("two", "2")], ["2"]),
        (ONE, [("two", "2"), ("one", None)], ["2", "1"]),
        (ONE, [("two", "2"), ("one", "9")], ["2", "1"]),
        (ONE, [("two", "1"), ("one", "1")], ["2", "1"]),
        (TWO, [("two", "1"), ("one", "2")], ["2", "1"]),
        ([called("f"), called("f", "2")], [("two", "2"), ("one", "1")], ["2", "1"]),
        ([called("f"), called("f", "2")], [("two", "2"), ("one", None)], ["2", "1"]),
        ([], [("two", "2"), ("one", "1")], ["2", "1"]),
    ],
    ids=["sorted", "in order", "some", "a result without id", "an unknown id", "results share an id",
         "calls share an id", "a call without id", "neither has one", "no calls"],
)  # fmt: skip
def test_order_of_results_in_5_3(calls, results, order):
    """Sorted only where every id is there, unique, and a call's."""
    prompt = render("glm-5.3", [user("u"), assistant("a", None, *calls), *[result(t, i) for t, i in results]])
    assert prompt.endswith("<|observation|>" + "".join(SHOWN[i] for i in order) + ASK)
    given = render("glm-5.2", [user("u"), assistant("a", None, *calls), *[result(t, i) for t, i in results]])
    texts = {"one": "1", "two": "2"}
    assert given.endswith("<|observation|>" + "".join(SHOWN[texts[text]] for text, _ in results) + ASK)


def test_ids_that_differ_in_case_are_different():
    calls = [called("f", "a"), called("f", "A")]
    prompt = render("glm-5.3", [user("u"), assistant("x", None, *calls), result("two", "A"), result("one", "a")])
    assert prompt.endswith(SHOWN["1"] + SHOWN["2"] + ASK)


def test_results_after_another_message_keep_their_order():
    messages = [user("u"), assistant("x", None, *ONE), user("v"), result("two", "2"), result("one", "1")]
    assert render("glm-5.3", messages).endswith("<|user|>v<|observation|>" + SHOWN["2"] + SHOWN["1"] + ASK)


@pytest.mark.parametrize(
    ("kind", "named"), [("image_url", "image"), ("input_audio", "audio"), ("video", "video"), ("audio_url", "audio")]
)
def test_other_media_in_5_3(kind, named):
    prompt = render("glm-5.3", [user([{"type": "text", "text": "see "}, {"type": kind, kind: {}}, "!"])])
    assert prompt.endswith(
        f"<|user|>see <reminder>You are unable to process this {named} because you don't have multi-modal "
        "input ability. Try different methods.</reminder>!" + ASK
    )


def test_prompts_are_prefixes_of_longer_ones():
    """Preserved thinking: what was cached of a conversation stays valid as it goes on."""
    longer = [*TOOL_LOOP, assistant("a3", "r3"), user("u3")]
    for name, kwargs in [("glm-5.2", {"clear_thinking": False}), ("glm-5.3", {})]:
        before = render(name, TOOL_LOOP, add_generation_prompt=False, **kwargs)
        assert render(name, longer, **kwargs).startswith(before)
    cleared = render("glm-5.2", TOOL_LOOP, add_generation_prompt=False)
    assert not render("glm-5.2", longer).startswith(cleared)
