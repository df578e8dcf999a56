"""Questions of several hops through the graph behind a web, and the report's three filters (section 4.2.3).

A question names one entity and describes others by relations: "the year in which the publisher of X began". Candidates
are all entities by all chains of relations of a level, in a shuffled order. Each question has candidates of its own, and
is the first of them that no filter drops:

    guessed        a reasoner without tools is right in one of 8 tries, by what is the answer most often
    found_at_once  a weak agent has the evidence after one search with the question and a look at the best three pages
    rejected       verification: another answer fits too, a page contradicts the evidence, or searches do not show it
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Literal, NamedTuple

from glm5.rl.environments.families import shuffled
from glm5.rl.environments.web import FACTS, Fact, Web

QUESTIONS = 5000
"""Of a level and web."""
TRIES = 8
TOP, RESULTS = 3, 8
"""Pages that the weak agent opens, and that a search shows."""


class Relation(NamedTuple):
    """From an entity of kind `source` to one of kind `target`, or a number (""): by a fact of its own or (`is_inverse`)
    of those that refer to it. `by`: of two or more the one with the least or greatest of this fact, or the difference.
    """

    source: str
    target: str
    fact: str
    phrase: str
    is_inverse: bool = False
    by: str = ""
    pick: Literal["", "min", "max", "difference"] = ""


Chain = tuple[Relation, ...]
RELATIONS = (
    *(
        Relation(one.kind, one.domain if isinstance(one.domain, str) else "", one.fact, one.phrase)
        for one in FACTS
        if one.phrase
    ),
    *(Relation(str(one.domain), one.kind, one.fact, one.inverse, is_inverse=True) for one in FACTS if one.inverse),
)
CHOICES = (
    Relation("company", "person", "founders", "the older founder of {}", by="born", pick="min"),
    Relation("company", "person", "founders", "the younger founder of {}", by="born", pick="max"),
    Relation(
        "company", "", "founders", "the years between the births of the founders of {}", False, "born", "difference"
    ),
    Relation("person", "novel", "author", "the first novel by {}", True, "published", "min"),
    Relation("person", "novel", "author", "the latest novel by {}", True, "published", "max"),
    Relation("company", "novel", "publisher", "the first novel from {}", True, "published", "min"),
)
"""Relations that compare."""


@dataclass(frozen=True)
class Question:
    """`steps`: a search, "" where a link leads on, with the facts on the pages that are opened then. `is_unique`:
    each relation leads to one entity or number. `difference`: the two years that the answer lies between."""

    text: str
    answer: str
    relation: Relation
    steps: Sequence[tuple[str, list[Fact]]]
    is_unique: bool
    difference: Sequence[int] = ()


def asked(web: Web, start: str, chain: Chain) -> Question | None:
    """The question of a walk; None where it leads nowhere or back, or compares one thing with itself."""
    at, text, is_unique, years = start, start, True, dict[str, int]()
    steps, been = list[tuple[str, list[Fact]]](), {start}
    for one in chain:
        names = web.holders.get((one.fact, at), []) if one.is_inverse else [at]
        ends = names if one.is_inverse else web.values[at, one.fact]
        query = f"{at} {one.target}" if one.is_inverse else "" if steps else at
        steps.append((query, [(name, one.fact) for name in names]))
        if one.by and len(ends) > 1:
            steps.append(("", [(end, one.by) for end in ends]))
            years = {end: int(web.values[end, one.by][0]) for end in ends}
            least, most = min(years.values()), max(years.values())
            wanted = least if one.pick == "min" else most
            ends = [str(most - least)] if one.pick == "difference" else [end for end in ends if years[end] == wanted]
        elif one.by or not ends:
            return None
        at, text, is_unique = ends[0], one.phrase.format(text), is_unique and len(ends) == 1
        if at in been:
            return None
        been.add(at)
    last = chain[-1]
    text = f"What is {'the name of ' if last.target else ''}{text}?"
    difference = [*years.values()] if last.pick == "difference" else ()
    return Question(text, at, last, steps, is_unique, difference)


class Asker:
    """Makes the questions of a web's levels, and filters them."""

    def __init__(self, web: Web) -> None:
        self.web = web
        four = [one for one in _chains(4, RELATIONS + CHOICES) if set(one) & set(CHOICES)]
        self._levels = [
            (chains, list(accumulate(len(web.names[one[0].source]) for one in chains)))
            for chains in (_chains(2, RELATIONS), _chains(3, RELATIONS), four)
        ]
        self._frequent: dict[Relation, list[str]] = {}

    def question(self, number: int, level: int) -> Question:
        """The first candidate that no filter drops."""
        return next(one for one in self.candidates(number, level) if self.dropped_by(one) is None)

    def candidates(self, number: int, level: int) -> Iterator[Question]:
        """Those of a question, and after these, should all be dropped, those of the next."""
        chains, until = self._levels[level]
        for attempt in count():
            more, attempt = divmod(attempt, until[-1] // QUESTIONS)
            place = shuffled(attempt * QUESTIONS + (number + more) % QUESTIONS, until[-1])
            chain = chains[which := bisect(until, place)]
            found = asked(self.web, self.web.names[chain[0].source][place - until[which]], chain)
            if found is not None:
                yield found

    def dropped_by(self, question: Question) -> str | None:
        """The name of the first filter that drops it."""
        filters = self.guessed, self.found_at_once, self.rejected
        return next((one.__name__ for one in filters if one(question)), None)

    def guessed(self, question: Question) -> bool:
        """Whether a reasoner without tools is right in one of TRIES: with what answers such questions most often."""
        relation = question.relation
        if relation not in self._frequent:
            all_asked = (asked(self.web, name, (relation,)) for name in self.web.names[relation.source])
            answers = Counter(one.answer for one in all_asked if one is not None)
            self._frequent[relation] = [answer for answer, _ in answers.most_common(TRIES)]
        return question.answer in self._frequent[relation]

    def found_at_once(self, question: Question) -> bool:
        """Whether a weak agent has the last step's facts: on the best TOP pages of a search with the question."""
        opened = {*self.web.search(question.text, TOP)}
        return all(opened & {page for page, _ in self.web.said[fact]} for fact in question.steps[-1][1])

    def rejected(self, question: Question) -> bool:
        """Whether verification fails: a step has several ends, a page contradicts a fact that is used, or a search does
        not show a page that is needed."""
        facts = [fact for _, facts in question.steps for fact in facts]
        return (
            not question.is_unique
            or any({value for _, value in self.web.said[fact]} != {*self.web.values[fact]} for fact in facts)
            or any(
                not {name for name, _ in facts} <= {*self.web.search(query, RESULTS)}
                for query, facts in question.steps
                if query
            )
        )


def _chains(length: int, relations: Sequence[Relation]) -> list[Chain]:
    """Chains of relations that fit each other; no fact is followed back at once."""
    found: list[Chain] = [(one,) for one in relations]
    for _ in range(length - 1):
        found = [
            (*chain, one)
            for chain in found
            for one in relations
            if chain[-1].target == one.source and chain[-1].fact != one.fact
        ]
    return found
