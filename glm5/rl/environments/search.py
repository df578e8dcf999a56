"""Questions about a generated web, in three levels: two hops, three, and four with comparisons and differences.

Each block of seeds has a web of its own, so that held-out tasks are about another one than trained tasks.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from threading import Lock
from typing import Any

from glm5.rl.environments.answers import answer_of, is_right
from glm5.rl.environments.boxes import NO_BOXES, Boxes
from glm5.rl.environments.hops import QUESTIONS, RESULTS, Asker, Question
from glm5.rl.environments.protocol import Environment, Reply, Task, Turn
from glm5.rl.environments.tool_use import LazyBox, Tool, ToolEpisode, call, function_tool
from glm5.rl.environments.tools import PYTHON, SECONDS
from glm5.rl.environments.web import Web

NUM_TURNS = 40
SEARCH = function_tool("search", "Search the web; you get titles of pages.", query="words")
OPEN = function_tool("open", "Read a page. What stands in [brackets] has a page of its own.", page="its title")
FIND = function_tool("find", "Get the lines of a page that contain a text.", page="its title", text="the text")
HOW = " Search the web. Your last message must be the answer alone: a name, or a number."


class Search(Environment):
    """`boxes`: where programs of the last level run."""

    name, num_turns, levels, sandbox_levels = "search", NUM_TURNS, 3, (2,)

    def __init__(self, boxes: Boxes = NO_BOXES) -> None:
        self._boxes, self._lock = boxes, Lock()

    def task(self, seed: int, level: int) -> Task:
        web, number = divmod(seed, QUESTIONS)
        question = self._asker(web).question(number, level)
        data = {"web": web, "answer": question.answer, "calls": _calls(question)}
        tools = (SEARCH, OPEN, FIND, PYTHON) if level in self.sandbox_levels else (SEARCH, OPEN, FIND)
        return Task(self.name, seed, level, ({"role": "user", "content": question.text + HOW},), data, tools)

    def reset(self, task: Task) -> ToolEpisode:
        box, web = LazyBox(self._boxes), self._asker(task.data["web"]).web
        tools: dict[str, Tool] = {
            "search": lambda given: _searched(web, given["query"]),
            "open": lambda given: _page(web, given["page"]),
            "find": lambda given: _found(_page(web, given["page"]), given["text"]),
            "python": lambda given: box.run_python(given["code"], SECONDS),
        }
        offered = {tool["function"]["name"]: tools[tool["function"]["name"]] for tool in task.tools}

        def score(reply: Reply) -> Turn:
            return Turn(is_done=True, rewards={"right": float(is_answer(reply.content, task.data["answer"]))})

        return ToolEpisode(task, offered, score, NUM_TURNS, box)

    def oracle(self, task: Task) -> Sequence[Reply]:
        return [*(Reply("", tool_calls=[each]) for each in task.data["calls"]), Reply(task.data["answer"])]

    def _asker(self, web: int) -> Asker:
        with self._lock:  # made once, whichever threads ask
            return _asker_of(web)


@lru_cache(maxsize=2)
def _asker_of(web: int) -> Asker:
    return Asker(Web(web))


def is_answer(content: str, answer: str) -> bool:
    """Whether a reply's answer is this name, but for case, punctuation and a leading "the"; or this number."""
    if answer.isdigit():
        return is_right(content, Fraction(answer))
    return _plain(re.split(r":|=|\bis\b", answer_of(content))[-1]) == _plain(answer)


def _plain(name: str) -> str:
    return " ".join(re.findall(r"\w+", name.lower())).removeprefix("the ")


def _calls(question: Question) -> list[dict[str, Any]]:
    """What finds the evidence, and computes a difference."""
    calls = list[dict[str, Any]]()
    for query, facts in question.steps:
        calls += [call("search", query=query)] if query else []
        calls += [call("open", page=page) for page, _ in facts]
    if question.years:
        calls.append(call("python", code="print(abs({} - {}))".format(*question.years)))
    return [one for number, one in enumerate(calls) if one not in calls[:number]]


def _searched(web: Web, query: str) -> str:
    lines = [f"[{title}] {web.pages[title].partition(chr(10))[0]}" for title in web.search(query, RESULTS)]
    return "\n".join(lines) or "nothing fits"


def _page(web: Web, title: str) -> str:
    title = title.strip(" []")
    if title not in web.pages:
        raise ValueError(f"no page is called {title!r:.80}; search shows titles")
    return web.pages[title]


def _found(page: str, text: str) -> str:
    return "\n".join(line for line in page.splitlines() if text.lower() in line.lower()) or "no line contains that"
