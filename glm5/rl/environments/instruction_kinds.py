"""Kinds of instruction that a program checks (in the manner of IFEval, arXiv 2311.07911; texts and checks are our own).

A kind asks, checks an answer, changes an answer so that it follows (`follow`), and so that it does not (`break_`).
Answers of several kinds are made by `follow` in the order of KINDS: language, shape, words, frame, case.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Point = Mapping[str, Any]
SENTENCES = {
    "English": "There is much to say of this. It has a long past. People see it in many ways. It is here to stay.",
    "German": "Es gibt viel zu sagen und zu lernen. Das ist nicht neu. Wir sehen es auf der ganzen Welt. Es ist gut.",
    "French": "Il y a beaucoup de choses à dire. Ce n'est pas une chose nouvelle. On le voit dans le monde entier.",
    "Spanish": "Hay mucho que decir de esto. No es una cosa nueva. La gente lo ve en todo el mundo. Es lo que hay.",
    "Italian": "C'è molto da dire di questo. Non è una cosa nuova. La gente lo vede in tutto il mondo. È qui per noi.",
}
"""A text in each language that is asked for."""
_COMMON = {
    "English": "the of and to in is it that for this has there as are was be",
    "German": "der die das und ist es nicht zu ein wir den auf mit auch sich wird gibt",
    "French": "le la les de des et est il une dans pas pour on que ce du",
    "Spanish": "el la los de que y es en un una no se lo por todo hay",
    "Italian": "il la di che e è un una non in si da del lo per tutto",
}
"""Frequent words: an answer is in the language that has the most of them."""
WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
_END = re.compile(r"[.!?]+(?=\s|$)")


@dataclass(frozen=True)
class Kind:
    """`ask`: a sentence with the parameters in braces. `grid`: the values of each."""

    ask: str
    check: Callable[[str, Point], bool]
    follow: Callable[[str, Point], str]
    break_: Callable[[str, Point], str]
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])


def words(text: str) -> list[str]:
    return WORD.findall(text)


def sentences(text: str) -> int:
    return len(_END.findall(text))


def lines(text: str) -> list[str]:
    """Those that are not empty."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def language(text: str) -> str:
    said = [word.lower() for word in words(text)]
    return max(_COMMON, key=lambda name: sum(word in _COMMON[name].split() for word in said))


def _split(text: str, count: int) -> list[str]:
    """A text as so many pieces, its words and more of them."""
    said = text.split()
    said += ["more"] * (count - len(said))
    size, rest = divmod(len(said), count)
    ends = [size * i + min(i, rest) for i in range(count + 1)]
    return [" ".join(said[a:b]) for a, b in pairwise(ends)]


def _listed(text: str, count: int, mark: Callable[[int], str]) -> str:
    return "\n".join(f"{mark(i)}{part}" for i, part in enumerate(_split(text, count), 1))


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _columns(text: str) -> int:
    """Of a table in Markdown; 0 if the text is none."""
    rows = [line.strip("|").split("|") for line in lines(text) if line.startswith("|") and line.endswith("|")]
    is_table = len(rows) == len(lines(text)) > 2 and all(re.fullmatch(r"\s*:?-{3,}:?\s*", cell) for cell in rows[1])
    return len(rows[0]) if is_table and len({len(row) for row in rows}) == 1 else 0


_N = {"n": (2, 3, 4, 5)}
KINDS: dict[str, Kind] = {
    "language": Kind(
        "Answer in {language}.",
        lambda text, of: len(words(text)) > 4 and language(text) == of["language"],
        lambda _, of: SENTENCES[of["language"]],
        lambda *_: SENTENCES["English"],
        {"language": [name for name in SENTENCES if name != "English"]},
    ),
    "sentences": Kind(
        "Use exactly {n} sentences.",
        lambda text, of: sentences(text) == of["n"],
        lambda text, of: " ".join(f"{part.strip('.')}." for part in _split(text.replace(".", ""), of["n"])),
        lambda text, of: " ".join([text, *["More."] * (of["n"] + 1)]),
        _N,
    ),
    "paragraphs": Kind(
        "Write exactly {n} paragraphs with an empty line between them.",
        lambda text, of: len([one for one in re.split(r"\n\s*\n", text) if one.strip()]) == of["n"],
        lambda text, of: "\n\n".join(_split(text, of["n"])),
        lambda text, _: " ".join(text.split()),
        _N,
    ),
    "lines": Kind(
        "Write exactly {n} lines.",
        lambda text, of: len(lines(text)) == of["n"],
        lambda text, of: "\n".join(_split(text, of["n"])),
        lambda text, _: " ".join(text.split()),
        _N,
    ),
    "bullets": Kind(
        'Write a list of exactly {n} points, each on a line that begins with "- ".',
        lambda text, of: len(lines(text)) == of["n"] and all(line.startswith("- ") for line in lines(text)),
        lambda text, of: _listed(text, of["n"], lambda _: "- "),
        lambda text, _: text.replace("- ", ""),
        _N,
    ),
    "numbered": Kind(
        'Write a numbered list of exactly {n} lines: "1. ", "2. " and so on.',
        lambda text, of: (
            len(lines(text)) == of["n"] and all(line.startswith(f"{i}. ") for i, line in enumerate(lines(text), 1))
        ),
        lambda text, of: _listed(text, of["n"], lambda i: f"{i}. "),
        lambda text, _: re.sub(r"\d+\. ", "", text),
        _N,
    ),
    "json": Kind(
        'Answer with a JSON object alone, whose keys are exactly "{first}" and "{second}".',
        lambda text, of: isinstance(found := _object(text), dict) and set(found) == {of["first"], of["second"]},
        lambda text, of: json.dumps(dict(zip((of["first"], of["second"]), _split(text, 2), strict=True))),
        lambda text, _: text.replace("{", "(").replace('"', ""),
        {"first": ("name", "title", "topic"), "second": ("text", "reason", "summary")},
    ),
    "table": Kind(
        "Answer with a table in Markdown alone, of exactly {n} columns and at least one row below its head.",
        lambda text, of: _columns(text) == of["n"],
        lambda text, of: "\n".join(
            f"| {' | '.join(row)} |" for row in (_split(text, of["n"]), ["---"] * of["n"], _split("more", of["n"]))
        ),
        lambda text, _: text.replace("|", " "),
        _N,
    ),
    "sections": Kind(
        'Divide it into exactly {n} sections, each under a heading line that begins with "## ".',
        lambda text, of: sum(line.startswith("## ") for line in lines(text)) == of["n"] and lines(text)[0][:3] == "## ",
        lambda text, of: "\n".join(f"## Part\n{part}" for part in _split(text, of["n"])),
        lambda text, _: text.replace("## ", ""),
        _N,
    ),
    "sorted-words": Kind(
        "Answer with {n} words alone, separated by commas, in alphabetical order.",
        lambda text, of: (
            len(said := [one.strip().lower() for one in text.split(",")]) == of["n"]
            and all(WORD.fullmatch(one) for one in said)
            and said == sorted(said)
        ),
        lambda _, of: ", ".join(("air", "earth", "fire", "light", "water")[: of["n"]]),
        lambda text, _: ", ".join(reversed(text.split(", "))) + " and more",
        _N,
    ),
    "acrostic": Kind(
        'Let the first letters of the lines spell "{word}".',
        lambda text, of: "".join(line[0] for line in lines(text)).upper() == of["word"],
        lambda text, of: "\n".join(
            f"{letter} {part}" for letter, part in zip(of["word"], _split(text, len(of["word"])), strict=True)
        ),
        lambda text, _: " ".join(text.split()),
        {"word": ("SUN", "TREE", "WAVE", "STONE")},
    ),
    "short-sentences": Kind(
        "No sentence may have more than {n} words.",
        lambda text, of: bool(words(text)) and all(len(words(one)) <= of["n"] for one in _END.split(text)),
        lambda text, of: " ".join(
            f"{' '.join(said[i : i + of['n']])}."
            for said in [text.replace(".", "").split()]
            for i in range(0, len(said), of["n"])
        ),
        lambda text, of: " ".join(["more"] * (of["n"] + 1) + [text]),
        {"n": (4, 5, 6, 8)},
    ),
    "two-answers": Kind(
        'Give two different answers with a line "******" between them, and nothing else.',
        lambda text, _: (
            len(parts := [one.strip() for one in text.split("******")]) == 2 and all(parts) and parts[0] != parts[1]
        ),
        lambda text, _: f"{text}\n******\nThe same in short: {text.split()[0]}",
        lambda text, _: text.replace("******", "---"),
    ),
    "no-lists": Kind(
        "Use no list and no heading.",
        lambda text, _: bool(words(text)) and not re.search(r"^\s*([-*#]|\d+\.)\s", text, re.MULTILINE),
        lambda text, _: text,
        lambda text, _: f"- {text}",
    ),
    "avoid-word": Kind(
        'Do not use the word "{word}".',
        lambda text, of: bool(words(text)) and of["word"] not in [word.lower() for word in words(text)],
        lambda text, of: re.sub(rf"\b{of['word']}\b", "one", text, flags=re.IGNORECASE),
        lambda text, of: f"{text} {of['word']}",
        {"word": ("it", "very", "people", "many", "long")},
    ),
    "keyword": Kind(
        'Use the word "{word}" at least {n} times.',
        lambda text, of: [word.lower() for word in words(text)].count(of["word"]) >= of["n"],
        lambda text, of: " ".join([text, *[of["word"]] * of["n"]]),
        lambda text, of: re.sub(rf"\b{of['word']}\b", "one", text, flags=re.IGNORECASE),
        {"word": ("window", "river", "morning", "copper"), "n": (2, 3, 4)},
    ),
    "avoid-letter": Kind(
        'Do not use the letter "{letter}".',
        lambda text, of: bool(words(text)) and of["letter"] not in text.lower(),
        lambda text, of: re.sub(of["letter"], "", text, flags=re.IGNORECASE),
        lambda text, of: f"{text} {of['letter']}",
        {"letter": tuple("bfkvwz")},
    ),
    "no-commas": Kind(
        "Do not use any comma.",
        lambda text, _: bool(words(text)) and "," not in text,
        lambda text, _: text.replace(",", ""),
        lambda text, _: f"{text}, more",
    ),
    "no-digits": Kind(
        "Do not use any digit.",
        lambda text, _: bool(words(text)) and not re.search(r"\d", text),
        lambda text, _: re.sub(r"\d", "", text),
        lambda text, _: f"{text} 7",
    ),
    "bold": Kind(
        "Print at least {n} parts in bold, as **these words**.",
        lambda text, of: len(re.findall(r"\*\*[^*\s][^*\n]*\*\*", text)) >= of["n"],
        lambda text, of: " ".join([text, *["**more**"] * of["n"]]),
        lambda text, _: text.replace("**", ""),
        _N,
    ),
    "placeholders": Kind(
        "Leave at least {n} places to fill in, in square brackets, such as [name].",
        lambda text, of: len(re.findall(r"\[[^\[\]\n]+\]", text)) >= of["n"],
        lambda text, of: " ".join([text, *["[name]"] * of["n"]]),
        lambda text, _: text.replace("[", "").replace("]", ""),
        _N,
    ),
    "capitals": Kind(
        "Write at least {n} words in capital letters alone.",
        lambda text, of: sum(word.isupper() and len(word) > 1 for word in words(text)) >= of["n"],
        lambda text, of: " ".join([text, *["MORE"] * of["n"]]),
        lambda text, _: text.lower(),
        _N,
    ),
    "at-least": Kind(
        "Use at least {n} words.",
        lambda text, of: len(words(text)) >= of["n"],
        lambda text, of: " ".join([text, *["more"] * max(0, of["n"] - len(words(text)))]),
        lambda text, _: (words(text) or ["no"])[0],
        {"n": (20, 30, 50, 80)},
    ),
    "at-most": Kind(
        "Use at most {n} words.",
        lambda text, of: 0 < len(words(text)) <= of["n"],
        lambda text, of: text if len(words(text)) <= of["n"] else " ".join(text.split()[: of["n"]]),
        lambda text, of: " ".join([text, *["more"] * (of["n"] + 1)]),
        {"n": (10, 25, 40, 60)},
    ),
    "begin": Kind(
        'Begin with the words "{phrase}".',
        lambda text, of: text.lower().startswith(of["phrase"].lower()),
        lambda text, of: f"{of['phrase']} {text}",
        lambda text, _: f"Well {text}",
        {"phrase": ("To begin with", "In my view", "Once upon a time", "As a rule")},
    ),
    "end": Kind(
        'End with the words "{phrase}".',
        lambda text, of: text.rstrip('."`* \n').lower().endswith(of["phrase"].lower()),
        lambda text, of: f"{text} {of['phrase']}",
        lambda text, _: f"{text} more",
        {"phrase": ("that is all", "so it goes", "and so on", "more or less")},
    ),
    "question": Kind(
        "End with a question.",
        lambda text, _: bool(words(text)) and text.rstrip('"`* \n').endswith("?"),
        lambda text, _: f"{text.rstrip('.')} or not?",
        lambda text, _: f"{text} No.",
    ),
    "postscript": Kind(
        'Add a postscript as the last line, which begins with "P.S.".',
        lambda text, _: len(lines(text)) > 1 and lines(text)[-1].lower().startswith("p.s."),
        lambda text, _: f"{text}\nP.S. more",
        lambda text, _: f"{text}\nno",
    ),
    "title": Kind(
        'Begin with a title, a line that begins with "# ".',
        lambda text, _: len(lines(text)) > 1 and lines(text)[0].startswith("# "),
        lambda text, _: f"# Title\n{text}",
        lambda text, _: text.replace("# ", "", 1),
    ),
    "quoted": Kind(
        "Put the whole answer in double quotation marks.",
        lambda text, _: len(text) > 2 and text[0] == text[-1] == '"',
        lambda text, _: f'"{text}"',
        lambda text, _: f"{text} more",
    ),
    "fence": Kind(
        "Put the whole answer in a block of code: three backticks before and after it.",
        lambda text, _: bool(re.fullmatch(r"```\w*\n.+\n```", text, re.DOTALL)) and text.count("```") == 2,
        lambda text, _: f"```\n{text}\n```",
        lambda text, _: f"{text} more",
    ),
    "lower": Kind(
        "Use no capital letter.",
        lambda text, _: bool(words(text)) and text == text.lower(),
        lambda text, _: text.lower(),
        lambda text, _: f"{text} More",
    ),
    "upper": Kind(
        "Use capital letters alone.",
        lambda text, _: bool(words(text)) and text == text.upper(),
        lambda text, _: text.upper(),
        lambda text, _: f"{text} more",
    ),
    "title-case": Kind(
        "Begin every word with a capital letter.",
        lambda text, _: bool(words(text)) and all(word[0].isupper() for word in words(text)),
        lambda text, _: WORD.sub(lambda found: found[0][0].upper() + found[0][1:], text),
        lambda text, _: f"{text} more",
    ),
}
