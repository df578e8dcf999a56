"""Questions of several hops through the graph behind a web, and the report's three filters (section 4.2.3).

A question names one entity and describes others by relations: "the year in which the publisher of X began". Candidates
are all entities by all chains of relations of a level, in a shuffled order. Each question has candidates of its own,
and is the first of them that no filter drops.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

from glm5.rl.environments.families import shuffled
from glm5.rl.environments.web import Fact, Web, parts

QUESTIONS = 5000
"""Of a level and web."""
TRIES = 8
TOP, RESULTS = 3, 8
"""Pages that the weak agent opens, and that a search shows."""


class Relation(NamedTuple):
    """From a kind to another or a number (""): by a fact "of" the entity, or of those that refer "to" it. `by`: of two
    or more the one with the "min" or "max" of this fact, or the "difference"."""

    source: str
    target: str
    fact: str
    way: str
    phrase: str
    by: str = ""
    pick: str = ""


Chain = tuple[Relation, ...]


@dataclass(frozen=True)
class Question:
    """`steps`: a search, "" where a link leads on, with the facts on the pages that are opened then. `is_unique`:
    each relation leads to one entity or number. `years`: those that the answer is the difference of."""

    text: str
    answer: str
    last: Relation
    steps: Sequence[tuple[str, list[Fact]]]
    is_unique: bool
    years: Sequence[int]


def asked(web: Web, start: str, chain: Chain) -> Question | None:
    """The question of a walk; None where it leads nowhere or back, or compares one thing with itself."""
    been, text, is_unique, years = [start], start, True, list[int]()
    steps = list[tuple[str, list[Fact]]]()
    for one in chain:
        at = been[-1]
        names = [at] if one.way == "of" else web.holders.get((one.fact, at), [])
        ends = web.values[at, one.fact] if one.way == "of" else names
        query = f"{at} {one.target}" if one.way == "to" else "" if steps else at
        steps.append((query, [(name, one.fact) for name in names]))
        years = [int(web.values[end, one.by][0]) for end in ends] if one.by else []
        if len(ends) < 1 + bool(one.by):
            return None
        if one.by:
            steps.append(("", [(end, one.by) for end in ends]))
            best = min(years) if one.pick == "min" else max(years)
            ends = [end for end, year in zip(ends, years, strict=True) if year == best]
        end = str(max(years) - min(years)) if one.pick == "difference" else ends[0]
        if end in been:
            return None
        been.append(end)
        text, is_unique = one.phrase.format(text), is_unique and (len(ends) == 1 or one.pick == "difference")
    last = chain[-1]
    text = f"What is {'the name of ' if last.target else ''}{text}?"
    return Question(text, been[-1], last, steps, is_unique, years if last.pick == "difference" else ())


class Asker:
    """Makes the questions of a web's levels, and filters them."""

    def __init__(self, web: Web) -> None:
        self.web = web
        relations, choices = ([Relation(*one) for one in parts()[name]] for name in ("relations", "choices"))
        hard = [chain for chain in _chains(4, relations + choices) if set(chain) & set(choices)]
        self._levels = [
            (chains, list(accumulate(len(web.names[one[0].source]) for one in chains)))
            for chains in (_chains(2, relations), _chains(3, relations), hard)
        ]
        self._frequent: dict[Relation, list[str]] = {}

    def question(self, number: int, level: int) -> Question:
        """The first candidate that no filter drops."""
        return next(one for one in self.candidates(number, level) if self.dropped_by(one) is None)

    def candidates(self, number: int, level: int) -> Iterator[Question]:
        """Those of a question; after these, should all be dropped, those of the next ones, the last first."""
        chains, until = self._levels[level]
        most = until[-1] // QUESTIONS
        for further, attempt in product(range(QUESTIONS), range(most)):
            row = most - 1 - attempt if further else attempt
            place = shuffled(row * QUESTIONS + (number + further) % QUESTIONS, until[-1])
            chain = chains[which := bisect(until, place)]
            if (found := asked(self.web, self.web.names[chain[0].source][place - until[which]], chain)) is not None:
                yield found

    def dropped_by(self, question: Question) -> str | None:
        """The name of the first filter that drops it."""
        filters = self.guessed, self.found_at_once, self.rejected
        return next((one.__name__ for one in filters if one(question)), None)

    def guessed(self, question: Question) -> bool:
        """Whether a reasoner without tools is right in TRIES: with the most frequent answers to such questions."""
        last = question.last
        if last not in self._frequent:
            all_asked = (asked(self.web, name, (last,)) for name in self.web.names[last.source])
            answers = Counter(one.answer for one in all_asked if one is not None)
            self._frequent[last] = [answer for answer, _ in answers.most_common(TRIES)]
        return question.answer in self._frequent[last]

    def found_at_once(self, question: Question) -> bool:
        """Whether a weak agent has the last step's facts: on the best TOP pages of a search with the question."""
        opened = {*self.web.search(question.text, TOP)}
        return all(opened & {page for page, _ in self.web.said[fact]} for fact in question.steps[-1][1])

    def rejected(self, question: Question) -> bool:
        """Whether verification finds another answer, a page that contradicts a fact, or a page that no search shows."""
        web = self.web
        facts = [fact for _, found in question.steps for fact in found]
        searched = [(query, {name for name, _ in found}) for query, found in question.steps if query]
        return (
            not question.is_unique
            or any({value for _, value in web.said[fact]} != {*web.values[fact]} for fact in facts)
            or any(not names <= {*web.search(query, RESULTS)} for query, names in searched)
        )


def _chains(length: int, relations: Sequence[Relation]) -> list[Chain]:
    """Chains of relations that fit each other; no fact is followed back at once."""
    found: list[Chain] = [(one,) for one in relations]
    for _ in range(length - 1):
        pairs = ((chain, one) for chain in found for one in relations if chain[-1].target == one.source)
        found = [(*chain, one) for chain, one in pairs if chain[-1].fact != one.fact]
    return found
