"""Generated tasks: they fill their length, hold their answers, and are the same wherever they are made."""

import re
from collections import Counter
from random import Random

import pytest

from glm5.common.errors import DataError
from glm5.train.data import needle
from glm5.train.data.ruler import TASKS, generate, score

LENGTH = 1500


def count(text):
    """Words and marks: what a tokenizer of whole words would say."""
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.fixture(scope="module")
def samples():
    return {task: [generate(task, LENGTH, i, count) for i in range(4)] for task in TASKS}


@pytest.mark.parametrize("task", TASKS)
def test_samples_fill_their_length(task, samples):
    lengths = [count(sample.prompt + sample.answer) for sample in samples[task]]
    assert max(lengths) <= LENGTH
    # One more piece of filler does not fit: a line of noise has 25 tokens; ten common words are
    # counted once more at a time.
    assert min(lengths) > LENGTH - 150


@pytest.mark.parametrize("task", TASKS)
def test_answers_score_and_others_do_not(task, samples):
    for i, sample in enumerate(samples[task]):
        assert score(sample, sample.answer.upper()) == 1.0
        assert score(sample, "I do not know.") == 0.0
        assert score(samples[task][(i + 1) % 4], sample.answer) < 1.0, "samples differ"
        assert all(answer in sample.prompt for answer in sample.answers)
        if len(sample.answers) > 1:
            assert score(sample, sample.answers[0]) == pytest.approx(1 / len(sample.answers))


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_follows_from_its_number(task, samples):
    assert generate(task, LENGTH, 2, count) == samples[task][2]
    assert generate(task, LENGTH, 2, count, seed=1) != samples[task][2]


def test_needles_are_told_as_they_are_asked(samples):
    for task in ("niah_multivalue", "niah_multiquery"):
        for sample in samples[task]:
            reported = dict(re.findall(r"magic numbers for ([\w-]+) is: (\d+)\.", sample.prompt)[::-1])
            requested = re.findall(r"\b[a-z]+-[a-z]+\b", sample.prompt.rpartition("\n")[2])
            if task == "niah_multiquery":
                assert sample.answers == tuple(reported[key] for key in dict.fromkeys(requested))
            else:
                places = [sample.prompt.index(answer) for answer in sample.answers]
                assert len(places) == 4
                assert places == sorted(places)


def test_needles_are_at_all_depths():
    depths = []
    for i in range(60):
        sample = generate("niah_single_1", 600, i, count)
        depths.append(sample.prompt.index(sample.answers[0]) / len(sample.prompt))
    assert {int(depth * 4) for depth in depths} == {0, 1, 2, 3}


def test_variables_are_assigned_in_order(samples):
    for sample in samples["vt"]:
        places = [sample.prompt.index(f"VAR {name} =") for name in sample.answers]
        assert places == sorted(places)


@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_the_answers_are_the_commonest(task, samples):
    for sample in samples[task]:
        body = sample.prompt.split("\n")[1]
        words = Counter(word for word in body.split() if word != "..." and not re.fullmatch(r"\d+\.", word))
        top = [word for word, _ in words.most_common(len(sample.answers))]
        assert set(top) == set(sample.answers)
        least, next_most = words[top[-1]], words.most_common(len(top) + 1)[-1][1]
        assert least > next_most, "no ties"


def test_two_hops_need_both_facts(samples):
    for sample in samples["qa_2"]:
        person = re.search(r"does (.+?) work\?", sample.prompt)
        assert person is not None
        firm = re.search(rf"{person[1]} works at (.+?)\.", sample.prompt)
        assert firm is not None
        assert f"{firm[1]} is in {sample.answers[0]}." in sample.prompt


def test_what_cannot_be_made_is_refused():
    with pytest.raises(DataError, match="task: got 'niah'; allowed: niah_single_1"):
        generate("niah", LENGTH, 0, count)
    with pytest.raises(DataError, match="needs at least"):
        generate("vt", 20, 0, count)


def test_typed_needles_are_answered_by_what_is_hidden(seed):
    ids, marks = needle.needles(Random(seed), 256)
    assert len(ids) == len(marks) == 256
    assert max(ids) < needle.VOCAB_SIZE
    assert sum(marks) == needle.NUM_CLASSES
    for i, mark in enumerate(marks):
        if mark:
            kind = ids[i - 1] - (needle.VOCAB_SIZE - needle.NUM_CLASSES)
            assert (ids[i] - needle.NUM_FILLER) // needle.NUM_VALUES == kind
            assert ids[: 256 - 2 * needle.NUM_CLASSES].count(ids[i]) == 1
    with pytest.raises(ValueError, match="no room"):
        needle.needles(Random(seed), 40)


def test_further_questions_ask_of_the_same_text():
    """The first question stays as it is; each further one is about another needle or person."""
    for task in ("niah_multikey_1", "niah_multikey_2", "qa_1", "qa_2"):
        sample = generate(task, 600, 3, count, questions=4)
        assert len(sample.more) == 3
        body = sample.prompt.rpartition("\n")[0]
        questions = [sample.prompt.rpartition("\n")[2], *(question.strip() for question, _ in sample.more)]
        assert len(set(questions)) == 4
        assert all(answer.strip(" .") in body for _, answer in sample.more)
        assert count(sample.text) <= 600
    assert generate("vt", 600, 3, count, questions=4).more == (), "where there is one answer, one question"
