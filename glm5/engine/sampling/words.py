"""Bad words as token sequences: how a tokenizer would write them at the start of a text, and within one."""

from collections.abc import Callable, Sequence

from glm5.common.errors import RequestError
from glm5.engine.sampling.params import MAX_BAD_WORD_LEN

_MAX_CHARS = 4096  # no more are worth encoding


def bad_word_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that `words` stand for, as vLLM spells them.

    Each word as it is; and with a space before it, where that changes its first token but not their number.
    Raises RequestError for a word that has no tokens, or more than the sampler watches.
    """
    spellings: list[tuple[int, ...]] = []
    for word in words:
        if len(word) > _MAX_CHARS:
            got = f"{word[:60]!r}... is {len(word)} characters"
            raise RequestError(f"bad_words: {got}; allowed: 1 to {_MAX_CHARS}", param="bad_words")
        plain, spaced = (tuple(encode(prefix + word.lstrip())) for prefix in ("", " "))
        if not 0 < len(plain) <= MAX_BAD_WORD_LEN:
            raise RequestError(
                f"bad_words: {word!r:.60} is {len(plain)} tokens; allowed: 1 to {MAX_BAD_WORD_LEN}", param="bad_words"
            )
        spellings.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            spellings.append(spaced)
    return tuple(dict.fromkeys(spellings))
