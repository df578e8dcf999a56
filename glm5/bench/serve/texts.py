"""Random prompts of a wanted length in tokens.

Without a tokenizer a text is random short English words, about one token each in most vocabularies; the tokens per word
of the server are measured by two requests before the run (`Words.measured`). With a tokenizer the length is exact.
Token ids need only the size of the vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body back
parent face level office door health person art war history party result change morning reason research girl guy
moment air teacher force education foot boy age policy lunch mind love market dinner table black white green red
blue river summer winter spring light sound voice music road street tree field stone glass metal wood paper fire
earth wind snow rain cloud star moon sun ocean island forest garden farm bridge tower wall floor window chair bed
kitchen phone letter page news map sign key lock box bag coat shirt shoe hat ring gold silver price cost value
trade bank store order list plan chart model test data code file note text image color shape size weight speed
distance energy heat cold open close start stop move turn hold carry bring send keep leave build break cut draw
write read speak listen watch learn teach think know feel want need try help play run walk jump swim fly drive
"""
WORDS = _COMMON.split()


class Source(Protocol):
    """A source of random prompts. `overhead`: tokens that the server's chat template adds to each."""

    overhead: int

    def draw(self, rng: np.random.Generator, num_tokens: int) -> str | list[int]:
        """A random prompt of about `num_tokens` tokens."""
        ...


class Words:
    """Random texts. `tokens_per_word`: of each word of `WORDS` with a space before it, or one mean for all."""

    def __init__(self, tokens_per_word: Sequence[int] | float = 1.0, overhead: int = 0) -> None:
        self.overhead = overhead
        self.mean = float(np.mean(tokens_per_word))
        self._counts = None if isinstance(tokens_per_word, float) else np.array(tokens_per_word)
        self._words = np.array(WORDS)

    @classmethod
    def of_tokenizer(cls, count: Callable[[str], int]) -> "Words":
        """Texts of exact length. `count` returns the number of tokens of a text."""
        return cls([count(f" {word}") for word in WORDS])

    @classmethod
    def measured(cls, num_words: tuple[int, int], num_tokens: tuple[int, int]) -> "Words":
        """From the prompt tokens that a server counted for a short and a longer text."""
        slope = (num_tokens[1] - num_tokens[0]) / (num_words[1] - num_words[0])
        if slope <= 0:
            return cls()
        return cls(float(slope), max(0, round(num_tokens[0] - slope * num_words[0])))

    def draw(self, rng: np.random.Generator, num_tokens: int) -> str:
        if self._counts is None:
            picks = rng.integers(len(WORDS), size=max(1, round(num_tokens / self.mean)))
        else:
            picks = rng.integers(len(WORDS), size=max(1, num_tokens))
            picks = picks[: np.searchsorted(self._counts[picks].cumsum(), num_tokens, side="right")]
            missing = num_tokens - int(self._counts[picks].sum())
            if missing > 0 and 1 in self._counts:  # without words of one token, the text is short by less than a word
                picks = np.append(picks, rng.choice(np.flatnonzero(self._counts == 1), missing))
        return " " + " ".join(self._words[picks].tolist())


class Ids:
    """Random token ids below `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        self.overhead = 0
        self._vocab_size = vocab_size

    def draw(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        return rng.integers(self._vocab_size, size=max(1, num_tokens)).tolist()
