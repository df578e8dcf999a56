"""A generated web: short pages about people, companies, places and works, written from a graph of facts.

All of it follows from one seed. Names are made of few parts, so many pages have similar names. A fact stands on the
page of what it is about, and not on that of what it refers to, which must be searched. Lists repeat years of people and
companies; some of these are wrong.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from random import Random
from typing import NamedTuple

from glm5.rl.environments.bm25 import Index

Fact = tuple[str, str]
"""The name of an entity, and which of its facts."""


class Kind(NamedTuple):
    """Entities of a kind: how many there are, and of what their names are made: a word and an end."""

    count: int
    name: str
    ends: Sequence[str]


class FactKind(NamedTuple):
    """A fact of a kind: possible numbers, or the kind that it refers to; how its page says it, how questions do, and
    how they refer to the one that has it, if they do."""

    kind: str
    fact: str
    domain: range | str
    sentence: str
    phrase: str
    inverse: str = ""
    count: int = 1


_WORDS = [a + b for a, b in product(
    ("Bar", "Cal", "Dov", "El", "Fen", "Gor", "Har", "Is", "Kel", "Lor", "Mar", "Nor", "Os", "Pel", "Ros", "Sal", "Tor",
    "Ul", "Ven", "Wes"), ("a", "and", "bor", "den", "eth", "fell", "ian", "ka", "lin", "mer", "na", "os", "ra", "rik",
    "sen", "ta", "vik", "wen", "yar", "zon"))]  # fmt: skip
KINDS = {
    "river": Kind(80, "{}{}", ("water", "brook")),
    "city": Kind(300, "{}{}", ("burg", "haven", "ford")),
    "university": Kind(240, "{} {}", ("College", "University")),
    "person": Kind(2600, "{} {}", _WORDS[::9]),
    "company": Kind(1100, "{} {}", ("Optics", "Foods", "Motors", "Press", "Energy", "Papers", "Robotics", "Glass")),
    "novel": Kind(
        1700, "The {1} of {0}", ("Harbour", "Winter", "Garden", "Letter", "Bridge", "Clock", "Road", "Voyage")
    ),
    "festival": Kind(700, "{} {}", ("Festival", "Fair", "Biennale")),
}
FACTS = (
    FactKind("river", "length", range(40, 2000), "It is {} km long.", "the length in km of {}"),
    FactKind("city", "population", range(2000, 900_000), "It has {} inhabitants.", "the number of inhabitants of {}"),
    FactKind("city", "settled", range(900, 1800), "It was settled in {}.", "the year in which {} was settled"),
    FactKind("city", "river", "river", "It lies on the river [{}].", "the river on which {} lies"),
    FactKind("university", "opened", range(1700, 1990), "It opened on DATE {}.", "the year in which {} opened"),
    FactKind("university", "students", range(900, 40_000), "It has {} students.", "the number of students of {}"),
    FactKind("university", "campus", "city", "Its campus is in [{}].", "the city of {}"),
    FactKind("person", "born", range(1850, 1990), "The date of birth is DATE {}.", "the year of birth of {}"),
    FactKind("person", "birthplace", "city", "The birthplace is [{}].", "the birthplace of {}"),
    FactKind("person", "studies", "university", "Years of study: at [{}].", "the university where {} studied"),
    FactKind("company", "founded", range(1870, 2015), "It began on DATE {}.", "the year in which {} began"),
    FactKind("company", "employees", range(12, 60_000), "It has {} employees.", "the number of employees of {}"),
    FactKind("company", "seat", "city", "Its head office is in [{}].", "the city with the head office of {}"),
    FactKind(
        "company", "founders", "person", "Its founders were [{}] and [{}].", "", "the only company founded by {}", 2
    ),
    FactKind("novel", "published", range(1880, 2020), "It came out on DATE {}.", "the year in which {} came out"),
    FactKind("novel", "author", "person", "It was written by [{}].", "the author of {}", "the only novel by {}"),
    FactKind(
        "novel", "publisher", "company", "Its publisher is [{}].", "the publisher of {}", "the only novel from {}"
    ),
    FactKind("novel", "setting", "city", "The story takes place in [{}].", "the city in which {} takes place"),
    FactKind(
        "festival", "held", range(1900, 2020), "It was first held on DATE {}.", "the year in which {} was first held"
    ),
    FactKind("festival", "place", "city", "It takes place in [{}].", "the city of {}"),
    FactKind(
        "festival",
        "patron",
        "company",
        "It is paid for by [{}].",
        "the patron of {}",
        "the only festival with {} as patron",
    ),
)
_LISTS = (("Companies", "seat", "founded"), ("People", "birthplace", "born"))
_WRONG = 0.06
"""Share of the years on lists that contradict the page of what they are about."""


@dataclass
class Web:
    """`values`: of each fact. `holders`: by a fact's name and value, the entities that have it. `said`: of each fact,
    the pages that state it, and the value that they give. `names`: of the entities of a kind."""

    names: dict[str, list[str]]
    values: dict[Fact, list[str]]
    holders: dict[tuple[str, str], list[str]]
    said: dict[Fact, list[tuple[str, str]]]
    pages: dict[str, str]

    @cached_property
    def _index(self) -> tuple[list[str], Index]:
        return list(self.pages), Index(list(self.pages.values()))

    def search(self, query: str, count: int) -> list[str]:
        """Titles of the pages that fit a query best."""
        titles, index = self._index
        return [titles[number] for number in index.best(query, count)]


def web_of(seed: int) -> Web:
    """The web of a seed."""
    random = Random(f"web {seed}")
    web = Web({}, {}, defaultdict(list), defaultdict(list), {})
    for kind, (count, form, ends) in KINDS.items():
        web.names[kind] = random.sample([form.format(*parts) for parts in product(_WORDS, ends)], count)
        facts = [one for one in FACTS if one.kind == kind]
        for name in web.names[kind]:
            sentences = [f"{name} is a {kind}."]
            for one in random.sample(facts, len(facts)):
                domain = web.names[one.domain] if isinstance(one.domain, str) else one.domain
                values = web.values[name, one.fact] = [str(value) for value in random.sample(domain, one.count)]
                date = f"{random.randint(1, 28)} {random.choice(('January', 'March', 'June', 'October'))}"
                sentences.append(one.sentence.replace("DATE", date).format(*values))
                for value in values:
                    web.holders[one.fact, value].append(name)
                    web.said[name, one.fact].append((name, value))
            web.pages[name] = "\n".join(sentences)
    for city, (what, place, fact) in product(web.names["city"], _LISTS):
        lines = [title := f"{what} of {city}"]
        for name in web.holders[place, city]:
            wrong = random.choice((-10, -1, 1, 10)) if random.random() < _WRONG else 0
            year = int(web.values[name, fact][0]) + wrong
            lines.append(f"[{name}], {fact} {year}")
            web.said[name, fact].append((title, str(year)))
        web.pages[title] = "\n".join(lines)
    return web
