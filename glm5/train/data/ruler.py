"""Tasks like those of RULER (Hsieh et al., 2404.06654), generated at any length, for training and evaluation.

    niah_single_1..3      one needle in noise or prose: word -> number, word -> uuid
    niah_multikey_1..3    others beside it: three needles, nothing but needles, nothing but needles of uuids
    niah_multivalue       a key with four values          niah_multiquery   four keys at once
    vt                    variables that take their value from each other
    cwe, fwe              the ten commonest words of a list; the three most frequent of coded words
    qa_1, qa_2            questions of one and of two hops over invented facts

A sample depends only on (seed, task, length, index). It has as much filler as fits the length, including the answer.
The score is the share of answers found in the output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random

from glm5.common.errors import DataError
from glm5.train.data import prose

NUM_HOPS = 4
NUM_COMMON = 10
NUM_FREQUENT = 3
MAX_GUESSES = 8
SAMPLES = 16
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Sample:
    """`prompt` ends where the answer begins. `answer` is the training target, `answers` the strings that `score` looks
    for. `more`: further questions about the same text, each with its answer, for training."""

    task: str
    prompt: str
    answer: str
    answers: tuple[str, ...]
    more: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        return self.prompt + self.answer + "".join(question + answer for question, answer in self.more)


Maker = Callable[[Random, int, int], Sample]
"""A sample with that amount of filler (sentences, needles, words or facts) and at most that many further questions."""


def generate(
    task: str, length: int, index: int, count: Callable[[str], int], seed: int = 0, questions: int = 1
) -> Sample:
    """Sample number `index` with as much filler as fits `length` tokens. `count`: the number of tokens of a text.
    `questions`: the maximal number of questions about a text.

    Raises `DataError` for an unknown task, and where the smallest sample is longer.
    """
    if task not in TASKS:
        raise DataError(f"task: got {task!r:.60}; allowed: {', '.join(TASKS)}")

    def make(size: int) -> Sample:
        return TASKS[task](Random(f"{seed} {task} {length} {index}"), size, questions - 1)

    def tokens(size: int) -> int:
        return count(make(size).text)

    least = tokens(1)
    if least > length:
        raise DataError(f"task {task} needs at least {least} tokens, and the length is {length}")
    return make(_largest(tokens, least, length))


def shortest(task: str, count: Callable[[str], int], questions: int = 1) -> int:
    """Tokens of a task with the least filler: the maximum of a few samples, since words and numbers differ."""
    return max(count(TASKS[task](Random(f"{task} {i}"), 1, questions - 1).text) for i in range(SAMPLES))


def _largest(tokens: Callable[[int], int], least: int, length: int) -> int:
    """The largest size of at most `length` tokens; size 1 has `least`. Tokens grow nearly linearly, so interpolation
    needs few guesses; after MAX_GUESSES it is a binary search."""
    low, at_low, high = 1, least, 0
    size, tried = 8, 0
    while not high or high - low > 1:
        got, tried = tokens(size), tried + 1
        if got <= length:
            low, at_low = size, got
        else:
            high = size
        guess = low + int((length - at_low) * (size - 1) / max(1, got - least))
        if not high:
            size = max(guess, low + 1)
        else:
            size = (low + high) // 2 if tried > MAX_GUESSES else min(max(guess, low + 1), high - 1)
    return low


def score(sample: Sample, output: str) -> float:
    """The share of the answers that the output contains, ignoring case."""
    return sum(answer.lower() in output.lower() for answer in sample.answers) / len(sample.answers)


def _needles(
    rng: Random,
    size: int,
    more: int,
    *,
    task: str,
    filler: str,
    key: str = "words",
    value: str = "numbers",
    num_keys: int = 1,
    num_values: int = 1,
    num_queried: int = 1,
) -> Sample:
    """`num_keys` keys with `num_values` values each; the first `num_queried` keys are queried."""
    draw = {"words": prose.words, "numbers": prose.numbers, "uuids": prose.uuids}
    total = num_keys + (size if filler == "needles" else 0)
    keys, values = draw[key](rng, total), draw[value](rng, total * num_values)
    facts = [
        f"One of the special magic {value} for {keys[i // num_values]} is: {each}." for i, each in enumerate(values)
    ]
    queried_facts = facts[: num_queried * num_values]
    if filler == "needles":
        lines = facts
        rng.shuffle(lines)
    else:
        plain = [prose.NOISE if filler == "noise" else prose.sentence(rng) for _ in range(size)]
        lines = _hidden(rng, plain, facts)
    found = sorted(queried_facts, key=lines.index)  # in the order of the text
    answers = tuple(fact.rpartition(": ")[2][:-1] for fact in found)
    if num_queried > 1:  # in the order of the question
        answers = tuple(values[: num_queried * num_values])
    prompt = (
        f"Some special magic {value} are hidden within the following text. Memorize them; you will be asked later.\n"
        f"{(' ' if filler == 'prose' else chr(10)).join(lines)}\n{_question(keys[:num_queried], value, len(answers))}"
    )
    others = list(zip(keys, values, strict=True))[num_queried : num_queried + more] if num_values == 1 else []
    further = tuple((f"\n{_question([key], value, 1)}", f" {each}.") for key, each in others)
    return Sample(task, prompt, f" {', '.join(answers)}.", answers, further)


def _question(keys: Sequence[str], value: str, number: int) -> str:
    """The question for the values of keys, `number` in all, and the beginning of its answer."""
    listed, kind = _listed(keys), value[:-1]
    if number == 1:
        what, verb, prefix = f"is the special magic {kind}", "is", f"The special magic {kind}"
    else:
        what, verb, prefix = f"are all the special magic {value}", "are", f"The special magic {value}"
    return (
        f"What {what} for {listed} mentioned in the provided text? "
        f"{prefix} for {listed} mentioned in the provided text {verb}"
    )


def _variables(rng: Random, size: int, _more: int) -> Sample:
    chain = prose.letters(rng, NUM_HOPS + 1, 5, _LETTERS.upper())
    (value,) = prose.numbers(rng, 1, 5)
    steps = [f"VAR {chain[0]} = {value}."] + [f"VAR {b} = VAR {a}." for a, b in pairwise(chain)]
    lines = [prose.NOISE] * size
    for place, step in zip(sorted(rng.choices(range(size + 1), k=len(steps)), reverse=True), steps[::-1], strict=True):
        lines.insert(place, step)
    prompt = (
        "Memorize and track the chain of variable assignments hidden in the following text.\n"
        f"{chr(10).join(lines)}\nFind all variables that are assigned the value {value} in the text above. "
        f"The {len(chain)} variables assigned the value {value} are:"
    )
    return Sample("vt", prompt, f" {', '.join(chain)}.", tuple(chain))


def _common_words(rng: Random, size: int, _more: int) -> Sample:
    # Others are `size` words in all: once each in short lists, three times in long ones; the common ones keep ahead.
    often, seldom = (30, 3) if size > 600 else (6 + size // 25, 1)
    picked = prose.words(rng, min(NUM_COMMON + size // seldom, len(prose.ADJECTIVES) * len(prose.NOUNS)))
    common, rest = picked[:NUM_COMMON], picked[NUM_COMMON:]
    drawn = common * often + rest * seldom
    rng.shuffle(drawn)
    listed = " ".join(f"{i}. {word}" for i, word in enumerate(drawn, 1))
    prompt = (
        "Below is a numbered list of words. Memorize the ones that appear most often.\n"
        f"{listed}\nWhat are the {NUM_COMMON} most common words in the list? The most common words are:"
    )
    return Sample("cwe", prompt, f" {', '.join(common)}.", tuple(common))


def _frequent_words(rng: Random, size: int, _more: int) -> Sample:
    """The word of rank r appears in proportion to r ** -2; rank 1 is dots instead of a word."""
    total = 40 + size
    coded = prose.letters(rng, max(6, total // 50), 6, _LETTERS)
    share = [rank**-2.0 for rank in range(1, len(coded) + 2)]
    counts = [max(1, round(total * each / sum(share))) for each in share]
    for rank in range(NUM_FREQUENT, -1, -1):  # no ties among the queried words
        counts[rank] = max(counts[rank], counts[rank + 1] + 1)
    drawn = ["..."] * counts[0]
    for word, times in zip(coded, counts[1:], strict=True):
        drawn += [word] * times
    rng.shuffle(drawn)
    top = coded[:NUM_FREQUENT]
    prompt = (
        "Read the following coded text and track the frequency of each coded word, without the dots.\n"
        f"{' '.join(drawn)}\nWhat are the {NUM_FREQUENT} most frequently appeared words in the above coded text? "
        f"The {NUM_FREQUENT} most frequent words are:"
    )
    return Sample("fwe", prompt, f" {', '.join(top)}.", tuple(top))


def _questions(rng: Random, size: int, more: int, *, task: str, hops: int) -> Sample:
    people, firms = prose.names(rng, size), prose.places(rng, size, " Works")
    towns = prose.places(rng, size, "burg")
    facts = [f"{person} works at {firm}." for person, firm in zip(people, firms, strict=True)]
    facts += [f"{firm} is in {town}." for firm, town in zip(firms, towns, strict=True)]
    rng.shuffle(facts)
    if hops == 1:
        questions = [f"Where does {person} work? {person} works at" for person in people[: more + 1]]
    else:
        questions = [f"In which town does {person} work? {person} works in" for person in people[: more + 1]]
    answers = firms if hops == 1 else towns
    prompt = f"Answer the question from the given facts.\n{' '.join(facts)}\n{questions[0]}"
    further = tuple((f"\n{question}", f" {each}.") for question, each in zip(questions[1:], answers[1:], strict=False))
    return Sample(task, prompt, f" {answers[0]}.", (answers[0],), further)


def _hidden(rng: Random, lines: list[str], needles: Sequence[str]) -> list[str]:
    """The lines with each needle between two of them, at any depth."""
    for needle in needles:
        lines.insert(rng.randint(0, len(lines)), needle)
    return lines


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


TASKS: dict[str, Maker] = {
    "niah_single_1": partial(_needles, task="niah_single_1", filler="noise"),
    "niah_single_2": partial(_needles, task="niah_single_2", filler="prose"),
    "niah_single_3": partial(_needles, task="niah_single_3", filler="prose", value="uuids"),
    "niah_multikey_1": partial(_needles, task="niah_multikey_1", filler="prose", num_keys=4),
    "niah_multikey_2": partial(_needles, task="niah_multikey_2", filler="needles"),
    "niah_multikey_3": partial(_needles, task="niah_multikey_3", filler="needles", key="uuids", value="uuids"),
    "niah_multivalue": partial(_needles, task="niah_multivalue", filler="prose", num_values=4),
    "niah_multiquery": partial(_needles, task="niah_multiquery", filler="prose", num_keys=4, num_queried=4),
    "vt": _variables,
    "cwe": _common_words,
    "fwe": _frequent_words,
    "qa_1": partial(_questions, task="qa_1", hops=1),
    "qa_2": partial(_questions, task="qa_2", hops=2),
}
