"""Questions are reproducible, held-out ones are never trained on, and marks cover exactly what the assistant says."""

import re

import pytest

from glm5.chat.template import ChatTemplate
from glm5.train.data.dialogues import example, messages, train_tokenizer
from glm5.train.data.questions import COPIED_WORDS, KINDS, NUM_WORDS, Size, conversation

NUM_DRAWN = 300


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.bundled("glm-5.2", train_tokenizer(768))


def drawn(kind, split, seed=0):
    return [conversation(kind, split, seed, index) for index in range(NUM_DRAWN)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_number_gives_the_same_question(kind):
    assert drawn(kind, "train") == drawn(kind, "train")
    assert drawn(kind, "train") != drawn(kind, "train", seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_questions_are_never_trained_on(kind):
    requested = {chat.turns[0].user for chat in drawn(kind, "held-out")}
    trained = {turn.user for seed in range(5) for chat in drawn(kind, "train", seed) for turn in chat.turns}
    assert len(requested) > 0.9 * NUM_DRAWN
    assert not requested & trained


def test_answers_are_right():
    for chat in drawn("sort", "train"):
        assert chat.turns[0].answer == "".join(sorted(chat.turns[0].user.split()[1]))
    for chat in drawn("think", "train"):
        turn = chat.turns[0]
        letters = turn.user.split()[3]
        assert turn.thought == "".join(sorted(letters))
        assert turn.answer == (max(letters) if "last" in turn.user else min(letters))
    for chat in drawn("recall", "train"):
        value = chat.turns[0].answer.removesuffix(".").split()[-1]
        assert re.findall(r"\w+", chat.turns[0].user).count(value) == 1
    for chat in drawn("tool", "train"):
        call = chat.turns[0].call
        assert all(str(value) in chat.turns[0].user for value in call.arguments.values())
        said = {"order": "It is done.", "lookup": f"The {call.result.replace(': ', ' is ')}."}
        assert chat.turns[0].answer == said[call.name]


@pytest.mark.parametrize("kind", KINDS)
def test_marked_tokens_are_what_the_assistant_says(kind, template):
    chat = conversation(kind, "train", 0, 3, Size(3))
    made = example(template, chat)
    said = template.tokenizer.decode([t for t, marked in zip(made.ids, made.labelled, strict=True) if marked])
    want = ""
    for message in messages(chat.turns):
        if message["role"] != "assistant":
            continue
        if message.get("reasoning_content"):
            want += message["reasoning_content"]
        want += "</think>" if chat.thinking else ""
        if calls := message.get("tool_calls"):
            arguments = calls[0]["function"]["arguments"].items()
            pairs = (f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments)
            want += f"<tool_call>{calls[0]['function']['name']}{''.join(pairs)}</tool_call><|observation|>"
        else:
            want += f"{message['content']}<|user|>"
    assert said == want


def test_recall_is_asked_far_beyond_index_topk(template):
    from glm5.config.presets import preset

    lengths = [len(example(template, chat).ids) for chat in drawn("recall", "held-out")[:20]]
    assert min(lengths) > NUM_WORDS > 3 * preset("nano").index_topk


def test_copy_questions_in_training_also_ask_for_arguments_of_tool_calls():
    trained = {turn.answer for chat in drawn("copy", "train") for turn in chat.turns}
    assert set(COPIED_WORDS) < trained
    assert not set(COPIED_WORDS) & {chat.turns[0].answer for chat in drawn("copy", "held-out")}
