"""What conversations teach: exactly what the model says when it is asked as the engine asks it."""

import pytest

from glm5.chat.template import BUNDLED, ChatTemplate
from glm5.common.errors import DataError
from glm5.train.data.chat import examples_of
from tests.support.conversations import TOOLS, assistant, called, result, user
from tests.support.tokenizers import tiny_tokenizer

TALK = [
    user("Weather?"),
    assistant("", "I look.", called("get_weather", city="Paris")),
    result("rain"),
    assistant("It rains.", "Easy."),
    user("And Rome?"),
    assistant("Sun.", "I know."),
]


def template(name="glm-5.2"):
    return ChatTemplate.bundled(name, tiny_tokenizer())


def said(example):
    """The marked runs of an example, as text."""
    runs, run = [], []
    for token_id, mark in zip([*example.ids, -1], [*example.marks, False], strict=True):
        if mark:
            run.append(token_id)
        elif run:
            runs.append(tiny_tokenizer().decode(run))
            run = []
    return runs


def learn(messages, name="glm-5.2", **row):
    return examples_of({"messages": messages, **row}, template(name), "row 1")


CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call><|observation|>"


@pytest.mark.parametrize("name", ["glm-5", "glm-5.1", "glm-5.2"])
def test_interleaved_thinking_gives_one_example_a_turn(name):
    first, second = learn(TALK, name, tools=TOOLS)
    assert said(first) == [f"I look.</think>{CALL}", "Easy.</think>It rains.<|user|>"]
    assert said(second) == ["I know.</think>Sun.<|user|>"]
    text = tiny_tokenizer().decode(second.ids)
    assert "I look." not in text, "later turns do not see earlier reasoning"
    assert "It rains." in text


def test_a_template_that_keeps_reasoning_gives_one_example():
    (example,) = learn(TALK, "glm-5.3", tools=TOOLS)
    assert len(said(example)) == 3


def test_preserved_thinking_is_one_example():
    (example,) = learn(TALK, thinking="preserved", tools=TOOLS)
    assert said(example) == [
        f"I look.</think>{CALL}",
        "Easy.</think>It rains.<|user|>",
        "I know.</think>Sun.<|user|>",
    ]


def test_without_thinking_all_turns_are_one_example():
    talk = [user("a"), assistant("b"), user("c"), assistant("d")]
    (example,) = learn(talk, thinking="off")
    assert said(example) == ["b<|user|>", "d<|user|>"]


@pytest.mark.parametrize(
    ("name", "runs"),
    [("glm-5", [["b<|user|>", "Hm.</think>d<|user|>"]]), ("glm-5.2", [["b<|user|>"], ["Hm.</think>d<|user|>"]])],
)
def test_thinking_can_be_off_for_a_turn(name, runs):
    """GLM-5.2 tells the model in its first line, so there the turns are examples of their own."""
    talk = [user("a"), assistant("b"), user("c"), assistant("d", "Hm.")]
    assert [said(example) for example in learn(talk, name)] == runs


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("thinking", ["interleaved", "preserved"])
def test_what_is_learnt_follows_the_prompt_of_the_engine(name, thinking):
    """The tokens before the last marked run are the prompt, id for id, that a server makes of the same messages."""
    example = learn(TALK, name, thinking=thinking)[-1]
    begin = max(i for i in range(1, len(example.ids)) if example.marks[i] and not example.marks[i - 1])
    options = {"clear_thinking": False} if thinking == "preserved" else {}
    prompt = template(name).encode(TALK[:-1], **options)
    assert example.ids[:begin] == prompt


def test_pieces_encode_as_the_whole_text_does():
    for example in learn(TALK, tools=TOOLS):
        assert tiny_tokenizer().encode(tiny_tokenizer().decode(example.ids)) == example.ids


def test_errors_of_the_model_are_context_only():
    talk = [user("a"), {**assistant("wrong"), "loss": False}, user("no"), assistant("right")]
    (example,) = learn(talk, thinking="off")
    assert said(example) == ["right<|user|>"]
    assert "wrong" in tiny_tokenizer().decode(example.ids)
    assert learn([user("a"), {**assistant("wrong"), "loss": False}]) == []


def test_rows_of_ids_are_taken_as_they_are():
    (example,) = examples_of({"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, template(), "row 1")
    assert (example.ids, example.marks) == ([1, 2, 3], [False, True, True])
    assert examples_of({"token_ids": [1], "loss_mask": [0], "source": "b"}, template(), "row 1") == []


def test_spelled_special_tokens_are_learnt_as_text():
    text = "ends with <|user|> or </think>"
    (example,) = learn([user(text), assistant(text, text, called("f", x=text)), result(text), assistant(text, "r")])
    call = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call><|observation|>"
    assert said(example) == [f"{text}</think>{text}{call}", f"r</think>{text}<|user|>"]
    tokenizer = tiny_tokenizer()
    assert [example.ids.count(tokenizer.id_of(tag)) for tag in ("<|user|>", "</think>")] == [2, 2]


def test_reasoning_in_a_content_is_learnt_only_where_it_is_tokens():
    row = {"messages": [user("a"), assistant(" <think>b</think>c")]}
    with pytest.raises(DataError, match=r"row 1: messages\[1\].content begins with <think>.*reasoning_content"):
        examples_of(row, template(), "row 1")
    allowing = ChatTemplate.bundled("glm-5.2", tiny_tokenizer(), allow_control_tokens=True)
    (example,) = examples_of(row, allowing, "row 1")
    assert said(example)[0].endswith("b</think>c<|user|>")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([], "an object"),
        ({}, "either messages or token_ids"),
        ({"messages": [], "token_ids": []}, "either messages or token_ids"),
        ({"messages": []}, "at least one"),
        ({"messages": [3]}, r"messages\[0\] must be an object"),
        ({"messages": [{"role": "user", "content": "a", "loss": True}]}, r"messages\[0\].loss"),
        ({"messages": [user("a"), {**assistant("b"), "loss": "yes"}]}, r"messages\[1\].loss"),
        ({"messages": [user("a"), {**assistant("b"), "Loss": False}]}, r"messages\[1\]: got the key 'Loss'.*'loss'"),
        ({"messages": [user("a"), assistant("b")], "tool": []}, "got the key 'tool'.*'tools'"),
        ({"messages": [user("a"), assistant("b")], "thinking": "on"}, "thinking: got 'on'"),
        ({"messages": [user("a"), assistant("b", "c")], "thinking": "off"}, "thinking is off"),
        ({"messages": [{"role": "king", "content": "a"}, assistant("b")]}, "king"),
        ({"messages": [{"role": "king", "content": "a"}]}, "king"),
        ({"token_ids": [1, "a"], "loss_mask": [1, 1]}, "token_ids must be"),
        ({"token_ids": [1, 2], "loss_mask": [1]}, "loss_mask must be"),
        ({"token_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask must be"),
    ],
)
def test_bad_rows_say_where_and_what(row, says):
    with pytest.raises(DataError, match=f"row 1: .*{says}"):
        examples_of(row, template(), "row 1")
