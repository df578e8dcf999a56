"""The search environment: webs, questions, the three filters, tools, and answers.

`pytest -m long -s tests/unit/rl/test_search.py` prints what the filters remove of 10,000 questions of each level.
"""

import hashlib
import re
import time
from collections import Counter
from dataclasses import replace

import pytest

from glm5.rl.environments.bm25 import Index
from glm5.rl.environments.hops import QUESTIONS, TRIES, Asker, Relation, asked
from glm5.rl.environments.play import play, play_oracle
from glm5.rl.environments.protocol import EpisodeFailed, Reply
from glm5.rl.environments.search import NUM_TURNS, is_answer
from glm5.rl.environments.table import make
from glm5.rl.environments.tool_use import call
from glm5.rl.environments.web import Web, parts
from tests.unit.rl.boxes import WITHIN

SEARCH = make("search", WITHIN)
KEYS = "cf2b91c231234aca"  # of the first 12 tasks of every level


@pytest.fixture(scope="module")
def asker() -> Asker:
    return Asker(Web(0))


def relation(fact: str, way: str = "of", name: str = "relations", pick: str = "") -> Relation:
    return next(one for each in parts()[name] if (one := Relation(*each))[2:4] == (fact, way) and one.pick == pick)


def check(level: int, num_tasks: int) -> tuple[int, int]:
    """Distinct tasks, and those that their oracle solves."""
    tasks = [SEARCH.task(seed, level) for seed in range(num_tasks)]
    return len({task.key for task in tasks}), sum(play_oracle(SEARCH, task).rewards == [1.0] for task in tasks)


@pytest.mark.parametrize("level", range(3))
def test_tasks_are_distinct_and_solved_by_their_oracle_alone(level):
    assert check(level, 24) == (24, 24)
    for seed in range(0, 24, 6):
        task = SEARCH.task(seed, level)
        assert len(task.data["calls"]) < NUM_TURNS
        for wrong in ("", "I do not know", "nothing", f"{task.data['answer']} or Oslo", task.messages[0]["content"]):
            assert play(SEARCH, task, lambda _, said=wrong: Reply(said)).rewards == [0.0]


@pytest.mark.long
def test_ten_thousand_tasks_of_each_level():
    """Two webs."""
    print("\nlevel  questions  distinct  candidates  guessed  found at once  rejected  most tries  ms a question")
    for level in range(3):
        began, dropped, keys, most = time.process_time(), Counter(), set(), 0
        for web in range(10_000 // QUESTIONS):
            asker = Asker(Web(web))
            for number in range(QUESTIONS):
                for tries, one in enumerate(asker.candidates(number, level), start=1):
                    name = asker.dropped_by(one)
                    dropped[name] += 1
                    if name is None:
                        keys.add((web, one.text))
                        most = max(most, tries)
                        break
        ms = (time.process_time() - began) / 10
        total, left = dropped.total(), dropped.total()
        shares = []
        for name in ("guessed", "found_at_once", "rejected"):
            shares.append(dropped[name] / left)
            left -= dropped[name]
        told = "  ".join(f"{share:.1%}" for share in shares)
        print(f"{level}  {dropped[None]}  {len(keys)}  {total}  {told}  {most}  {ms:.2f}")
        assert len(keys) == dropped[None] == 10_000


def test_a_task_is_the_same_everywhere():
    """A run that goes on after an update must know its tasks."""
    keys = [make("search").task(seed, level).key for seed in range(12) for level in range(3)]
    assert hashlib.sha256("".join(keys).encode()).hexdigest()[:16] == KEYS


def test_held_out_tasks_are_about_another_web():
    first, other = SEARCH.task(0, 0), SEARCH.task(QUESTIONS, 0)
    assert (first.data["web"], other.data["web"]) == (0, 1)
    names = [task.data["calls"][0]["function"]["arguments"]["query"] for task in (first, other)]
    assert names[0] != names[1]


def test_a_web_is_what_its_pages_say(asker):
    """Read again from the texts: what the graph has, and what lists contradict."""
    web, contradicted = asker.web, 0
    assert Web(0).pages == web.pages
    for (name, fact), found in list(web.said.items())[::41]:
        for page, value in found:
            lines = [line for line in web.pages[page].splitlines() if page == name or f"[{name}]" in line]
            assert any(re.search(rf"(\b|\[){re.escape(value)}(\b|\])", line) for line in lines), (page, name, fact)
        contradicted += {value for _, value in found} != {*web.values[name, fact]}
    assert contradicted > 0
    titles = {title.split(" ")[0] for title in web.names["person"]}
    assert len(titles) < len(web.names["person"]) / 5  # names are alike
    assert all(link in web.pages for page in list(web.pages.values())[::29] for link in re.findall(r"\[(.*?)\]", page))


def test_the_best_page_has_the_rarest_words():
    index = Index(
        ["a red fox", "a red red dog", "a blue dog", "a long text about a fox and its many blue friends", *"aaaa"]
    )
    assert index.best("fox", 5) == [0, 3]
    assert index.best("RED, fox!", 1) == [0]
    assert index.best("a", 5) == []  # in every text
    assert index.best("dog " * 10_000, 9) == index.best("dog", 9)
    assert index.best("", 3) == index.best("zebra", 3) == []


def test_questions_follow_the_graph(asker):
    web = asker.web
    novel = web.names["novel"][0]
    (author,), (publisher,) = web.values[novel, "author"], web.values[novel, "publisher"]
    found = asked(web, novel, (relation("author"), relation("born")))
    assert found.text == f"What is the year of birth of the author of {novel}?"
    assert [found.answer] == web.values[author, "born"]
    assert found.steps == [(novel, [(novel, "author")]), ("", [(author, "born")])]
    for pick, fit in (("min", min), ("max", max)):
        founders = web.values[publisher, "founders"]
        older = asked(web, novel, (relation("publisher"), relation("founders", name="choices", pick=pick)))
        assert int(web.values[older.answer, "born"][0]) == fit(int(web.values[each, "born"][0]) for each in founders)
        assert set(founders) == {name for name, _ in older.steps[-1][1]}
    lonely = next(name for name in web.names["person"] if not web.holders.get(("author", name)))
    assert asked(web, lonely, (relation("author", "to"),)) is None
    by_one = next(each for each in web.names["person"] if len(web.holders.get(("author", each), ())) == 1)
    (only,) = web.holders["author", by_one]
    assert asked(web, only, (relation("author"), relation("author", "to"))) is None  # it leads back


def test_each_filter_drops_what_it_must(asker):
    """A control for each: a question that no filter drops, changed in the one thing that the filter is about."""
    web, good = asker.web, asker.question(0, 1)
    assert asker.dropped_by(good) is None
    asker.guessed(good)
    assert asker.dropped_by(replace(good, answer=asker._frequent[good.last][TRIES - 1])) == "guessed"
    page = good.steps[-1][1][0][0]
    assert asker.dropped_by(replace(good, text=f"{good.text} {page}")) == "found_at_once"
    assert asker.dropped_by(replace(good, is_unique=False)) == "rejected"
    lost = [("zebra", [good.steps[0][1][0]])]
    assert asker.dropped_by(replace(good, steps=[*lost, *good.steps])) == "rejected"
    fact = good.steps[0][1][0]
    web.said[fact].append(("a page", "another value"))
    assert asker.dropped_by(good) == "rejected"
    web.said[fact].pop()
    assert asker.dropped_by(good) is None


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("Barsen Foods", "Barsen Foods", True),
        ("The answer is: **barsen foods**.", "Barsen Foods", True),
        ("\\boxed{Barsen Foods}", "Barsen Foods", True),
        ("I looked.\nRoad of Elta", "The Road of Elta", True),
        ("Barsen", "Barsen Foods", False),
        ("Barsen Foods and Papers", "Barsen Foods", False),
        ("Barsen Foods\nor not", "Barsen Foods", False),
        ("It is 1,957.", "1957", True),
        ("1957", "1957", True),
        ("1957 or 1958", "1957", False),
        ("1956", "1957", False),
        ("", "Barsen Foods", False),
    ],
)
def test_answers(said, answer, right):
    assert is_answer(said, answer) is right


def test_tools_answer_and_tell_what_is_wrong(asker):
    task = SEARCH.task(0, 0)
    episode, page = SEARCH.reset(task), task.data["calls"][-1]["function"]["arguments"]["page"]

    def told(name: str, **arguments) -> str:
        (message,) = episode.step(Reply("", tool_calls=[call(name, **arguments)])).messages
        return message["content"]

    assert told("search", query=page).startswith(f"[{page}]")
    assert told("open", page=f"[{page}]") == asker.web.pages[page]
    line = asker.web.pages[page].splitlines()[1]
    assert told("find", page=page, text=line.upper()[:12]).splitlines()[0] == line
    assert told("find", page=page, text="zebra") == "no line contains that"
    assert told("search", query="zebra") == "nothing fits"
    assert "no page is called 'Zebra'" in told("open", page="Zebra")
    assert "'page' must be text, not list" in told("open", page=["Zebra"])
    assert "no tool is called 'python'" in told("python", code="1")  # not at this level


def test_the_last_level_may_compute():
    asks = (seed for seed in range(400) if SEARCH.task(seed, 2).data["calls"][-1]["function"]["name"] == "python")
    task = SEARCH.task(next(asks), 2)
    assert "the years between the births of the founders of" in task.messages[0]["content"]
    *_, computed, _ = play_oracle(SEARCH, task).conversations[0]
    assert computed["content"].strip() == task.data["answer"]
    with pytest.raises(EpisodeFailed) as caught:
        play_oracle(make("search"), task)
    assert caught.value.kind == "sandbox"
