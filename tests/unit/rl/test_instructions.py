"""Instructions that a program checks, and prompts of general RL: oracles pass, what does not follow earns nothing."""

import pytest

from glm5.rl.environments.instruction_kinds import KINDS, SENTENCES, language
from glm5.rl.environments.instructions import followed
from glm5.rl.environments.play import play, play_oracle
from glm5.rl.environments.protocol import Reply
from glm5.rl.environments.table import make

CASES: dict[str, tuple[dict, list[str], list[str]]] = {
    "language": ({"language": "German"}, ["Das ist ein Brief, und er ist nicht lang."], ["This is a letter.", "Das"]),
    "sentences": ({"n": 2}, ["One. Two!", "Is it 3.5? Yes."], ["One.", "One. Two. Three.", "One, two"]),
    "paragraphs": ({"n": 2}, ["a\n\nb", "a\nb\n \n\nc"], ["a\nb", "a\n\nb\n\nc"]),
    "lines": ({"n": 2}, ["a\nb", "a\n\nb"], ["a", "a\nb\nc"]),
    "bullets": ({"n": 2}, ["- a\n- b"], ["- a", "- a\n* b", "a\n- b\n- c", "-a\n-b"]),
    "numbered": ({"n": 2}, ["1. a\n2. b"], ["1. a\n3. b", "1) a\n2) b", "1. a"]),
    "json": (
        {"first": "name", "second": "text"},
        ['{"name": 1, "text": []}'],
        [
            '{"name": 1}',
            '{"name": 1, "text": 2, "x": 3}',
            '["name", "text"]',
            'Here: {"name": 1, "text": 2}',
            "[" * 9999,
        ],
    ),
    "table": (
        {"n": 2},
        ["| a | b |\n|---|:---:|\n| 1 | 2 |"],
        ["| a | b |\n|---|---|", "| a |\n|---|\n| 1 |", "a | b"],
    ),
    "sections": ({"n": 2}, ["## A\nx\n## B\ny"], ["## A\nx", "x\n## A\n## B", "# A\n# B"]),
    "sorted-words": ({"n": 2}, ["ape, bee"], ["bee, ape", "ape, bee, cat", "ape bee", "a b, c"]),
    "acrostic": ({"word": "SUN"}, ["So\nus\nno"], ["So us no", "So\nno", "sun"]),
    "short-sentences": ({"n": 4}, ["One two. Three four five six."], ["One two three four five.", ""]),
    "no-lists": ({}, ["a - b"], ["- a", "a\n# b", "text\n2. b", ""]),
    "two-answers": ({}, ["a\n******\nb"], ["a", "a\n******\na", "a******b******c", "******"]),
    "avoid-word": ({"word": "it"}, ["sit there"], ["It is", "is it."]),
    "keyword": ({"word": "river", "n": 2}, ["River and river"], ["river", "rivers rivers"]),
    "avoid-letter": ({"letter": "k"}, ["a word"], ["Kind"]),
    "no-commas": ({}, ["a b"], ["a, b"]),
    "no-digits": ({}, ["one"], ["1"]),
    "bold": ({"n": 2}, ["**a** and **b c**"], ["**a**", "** a ** **b**", "a * b * c"]),
    "placeholders": ({"n": 2}, ["[a] [b]"], ["[a]", "[] []"]),
    "capitals": ({"n": 2}, ["GO NOW there"], ["GO now", "I A"]),
    "at-least": ({"n": 3}, ["a b c"], ["a b", "1 2 3"]),
    "at-most": ({"n": 3}, ["a b c", "a"], ["a b c d", ""]),
    "begin": ({"phrase": "As a rule"}, ["as a rule, no"], ["So as a rule"]),
    "end": ({"phrase": "so it goes"}, ["And so it goes."], ["so it goes on"]),
    "question": ({}, ["Is it?"], ["It is.", "?"]),
    "postscript": ({}, ["a\nP.S. b"], ["P.S. b", "a P.S. b", "a\nP.S. b\nc"]),
    "title": ({}, ["# T\ntext"], ["# T", "text\n# T", "#T\ntext"]),
    "quoted": ({}, ['"a"'], ['"a" b', '""', "'a'"]),
    "fence": ({}, ["```\na\n```", "```text\na\n```"], ["a", "```a```", "x\n```\na\n```"]),
    "lower": ({}, ["all small, 1"], ["All", "1"]),
    "upper": ({}, ["ALL BIG, 1"], ["ALl", "1"]),
    "title-case": ({}, ["All Big"], ["All big", ""]),
}


def test_there_are_enough_kinds_and_each_has_cases():
    assert len(KINDS) >= 25
    assert CASES.keys() == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_knows_what_follows_it(name):
    point, right, wrong = CASES[name]
    assert [text for text in right if not KINDS[name].check(text, point)] == []
    assert [text for text in wrong if KINDS[name].check(text, point)] == []


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_makes_a_text_that_follows_and_one_that_does_not(name):
    kind = KINDS[name]
    keys, longest = list(kind.grid), max(map(len, kind.grid.values()), default=1)
    for i in range(longest):
        point = {key: kind.grid[key][i % len(kind.grid[key])] for key in keys}
        text = kind.follow(SENTENCES["English"], point).strip()
        assert kind.check(text, point), text
        assert not kind.check(kind.break_(text, point).strip(), point)
        assert "{" not in kind.ask.format_map(point)


def test_languages_are_told_apart():
    assert {name: language(text) for name, text in SENTENCES.items()} == {name: name for name in SENTENCES}


def test_ten_thousand_tasks_differ():
    environment = make("instructions")
    assert len({environment.task(seed, 0).messages[0]["content"] for seed in range(10_000)}) == 10_000


@pytest.mark.parametrize("name", ["instructions", "correctness", "emotional", "quality"])
def test_oracles_earn_1_and_what_does_not_follow_0(name):
    environment = make(name)
    for level in range(environment.levels):
        for seed in range(40):
            task = environment.task(seed, level)
            assert environment.task(seed, level).key == task.key
            assert play_oracle(environment, task).rewards == [1.0]
            for said in (environment.unsolved(task)[0], Reply("")):
                assert play(environment, task, lambda _, said=said: said).rewards == [0.0], (task, said)
            assert task.data["rubric"]
            assert len(task.data["instructions"]) == level + 1 or name != "instructions"


def test_the_share_that_is_followed_is_shown_and_all_are_rewarded():
    pairs = [["at-most", {"n": 3}], ["lower", {}]]
    assert (followed("all small", pairs), followed("All", pairs), followed("", pairs)) == (1.0, 0.5, 0.0)
    environment = make("instructions")
    task = environment.task(0, 2)
    broken = environment.unsolved(task)[0]
    last = play(environment, task, lambda _: broken).last
    assert last.rewards == {"instructions": 0.0}
    assert 0 <= last.metrics["followed"] < 1
