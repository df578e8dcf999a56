"""A generated web: short pages about people, companies, places and works, written from a graph of facts (`web.toml`).

Names are made of few parts, so many pages have similar names. A fact stands on the page of what it is about, and not on
that of what it refers to, which must be searched. Lists repeat years, and some of these are wrong.
"""

import tomllib
from collections import defaultdict
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from glm5.rl.environments.bm25 import Index

Fact = tuple[str, str]
"""The name of an entity, and which of its facts."""


@lru_cache
def parts() -> dict[str, Any]:
    """What webs are made of, and words for it."""
    return tomllib.loads(Path(__file__).with_name("web.toml").read_text(encoding="utf-8"))


class Web:
    """The web of a seed. `pages`: texts by title. `names`: of a kind's entities. `values`: of each fact; `holders`: the
    entities with that fact and value; `said`: the pages that state a fact, each with the value that it gives."""

    def __init__(self, seed: int) -> None:
        self.pages, self.names = dict[str, str](), dict[str, list[str]]()
        self.values: dict[Fact, list[str]] = {}
        self.holders: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.said: dict[Fact, list[tuple[str, str]]] = defaultdict(list)
        random = Random(f"web {seed}")
        words = [start + end for start, end in product(parts()["word_starts"], parts()["word_ends"])]
        for kind, count, form, ends in parts()["kinds"]:
            names = [form.format(*both) for both in product(words, ends or words[::9])]
            self.names[kind] = random.sample(names, count)
            for name in self.names[kind]:
                self._write(kind, name, random)
        for city, (what, place, fact) in product(self.names["city"], parts()["lists"]):
            lines = [title := f"{what} of {city}"]
            for name in self.holders[place, city]:
                wrong = random.choice((-10, -1, 1, 10)) if random.random() < parts()["wrong_share"] else 0
                year = int(self.values[name, fact][0]) + wrong
                lines.append(f"[{name}], {fact} {year}")
                self.said[name, fact].append((title, str(year)))
            self.pages[title] = "\n".join(lines)
        self._titles, self._index = list(self.pages), Index(list(self.pages.values()))

    def search(self, query: str, count: int) -> list[str]:
        """Titles of the pages that fit a query best."""
        return [self._titles[number] for number in self._index.best(query, count)]

    def _write(self, kind: str, name: str, random: Random) -> None:
        lines, facts = [f"{name} is a {kind}."], [one for one in parts()["facts"] if one[0] == kind]
        for _, fact, domain, count, sentence in random.sample(facts, len(facts)):
            choices = self.names[domain] if isinstance(domain, str) else range(domain[0], domain[1] + 1)
            values = self.values[name, fact] = [str(value) for value in random.sample(choices, count)]
            date = f"{random.randint(1, 28)} {random.choice(parts()['months'])}"
            lines.append(sentence.format(*values, date=date))
            for value in values:
                self.holders[fact, value].append(name)
                self.said[name, fact].append((name, value))
        self.pages[name] = "\n".join(lines)
