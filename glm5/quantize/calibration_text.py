"""Text to calibrate or measure on, as token ids: from a file, or sentences made here.

.txt    one stream, cut into samples        .jsonl, .json    one sample each: a string, or an object with text,
                                                             prompt, inputs or messages
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.common.bounded import TEXTS, read_bounded_text
from glm5.common.errors import ConfigError

GENERATED = "generated"
_KEYS = ("text", "prompt", "inputs", "inputs_pretokenized", "content")
_NOUNS = [
    "river",
    "engine",
    "garden",
    "teacher",
    "number",
    "winter",
    "market",
    "letter",
    "island",
    "student",
    "method",
    "window",
    "answer",
    "planet",
]
_VERBS = [
    "finds",
    "builds",
    "crosses",
    "explains",
    "measures",
    "follows",
    "repairs",
    "describes",
    "carries",
    "compares",
]
_PLACES = [
    "in the north",
    "at night",
    "before the rain",
    "near the old bridge",
    "with great care",
    "for the first time",
]
_CODE = (
    "def {f}({a}, {b}):\n    total = {a} * {n} + {b}\n    return total if total > {m} else -total\n",
    "for (int {a} = 0; {a} < {n}; ++{a}) {{ {b}[{a}] = {f}({a}) + {m}; }}\n",
    (
        "SELECT {a}, count(*) FROM {f} WHERE {b} > {n} GROUP BY {a} ORDER BY 2 DESC LIMIT {m};\n"
        '{{"{a}": {n}, "{b}": [{m}]}}\n'
    ),
)


def samples(
    where: str, tokenizer: Tokenizer | None, vocab_size: int, *, num_samples: int, sample_len: int, seed: int
) -> list[list[int]]:
    """Token ids of at most `num_samples` samples of at most `sample_len` tokens; the seed chooses among more.

    Without a tokenizer (a checkpoint of random weights) generated samples are random ids. ConfigError for a file that
    cannot be read or holds no text.
    """
    rng = Random(f"{seed} {where}")
    if tokenizer is None:
        if where != GENERATED:
            raise ConfigError(f"{where}: text needs a tokenizer, and the checkpoint has no tokenizer.json")
        return [[rng.randrange(vocab_size) for _ in range(sample_len)] for _ in range(num_samples)]
    if where == GENERATED:
        found = [tokenizer.encode(_page(rng, sample_len))[:sample_len] for _ in range(num_samples)]
    else:
        found = list(_from_file(Path(where).expanduser(), tokenizer, sample_len))
    found = [ids for ids in found if len(ids) > 1]
    if not found:
        raise ConfigError(f"{where}: holds no text of two tokens or more")
    if len(found) > num_samples:
        found = [found[idx] for idx in sorted(rng.sample(range(len(found)), num_samples))]
    return found


def _page(rng: Random, num_words: int) -> str:
    """About so many words: plain sentences, sums, code."""
    parts: list[str] = []
    count = 0
    while count < num_words:
        kind = rng.randrange(4)
        if kind == 0:
            names = {key: rng.choice(_NOUNS) for key in "fab"}
            part = rng.choice(_CODE).format(**names, n=rng.randrange(2, 100), m=rng.randrange(2, 10))
        elif kind == 1:
            a, b = rng.randrange(2, 1000), rng.randrange(2, 1000)
            part = f"{a} + {b} = {a + b}, {a} * {b} = {a * b}, so {max(a, b)} is the larger.\n"
        else:
            one, other = rng.sample(_NOUNS, 2)
            part = f"The {one} {rng.choice(_VERBS)} the {other} {rng.choice(_PLACES)}. "
        parts.append(part)
        count += len(part.split())
    return "".join(parts)


def _from_file(path: Path, tokenizer: Tokenizer, sample_len: int) -> Iterator[list[int]]:
    try:
        text = read_bounded_text(path, TEXTS, ConfigError)
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path}: cannot be read: {getattr(err, 'strerror', None) or err}") from None
    if path.suffix not in (".json", ".jsonl"):
        ids = tokenizer.encode(text)
        yield from (ids[start : start + sample_len] for start in range(0, len(ids), sample_len))
        return
    try:
        each = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{path}: is not valid JSON ({err})") from None
    for entry in each if isinstance(each, list) else [each]:
        yield tokenizer.encode(_text_of(entry, path))[:sample_len]


def _text_of(entry: Any, path: Path) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict):
        for key in _KEYS:
            if isinstance(entry.get(key), str):
                return entry[key]
        turns: Iterable[Any] = entry.get("messages") or entry.get("conversations") or ()
        said = [str(turn.get("content") or turn.get("value") or "") for turn in turns if isinstance(turn, dict)]
        if any(said):
            return "\n".join(said)
    raise ConfigError(
        f"{path}: an entry is {str(entry)[:60]!r}; allowed: a string, or an object with {_KEYS[0]}, "
        f"{', '.join(_KEYS[1:4])} or messages"
    )
