"""Prevents special token injection: text in messages that spells a special token is encoded as plain text.

Before the template runs, a mark is inserted after the first character of every special token that a message, a tool or
a template keyword spells, and where a text begins or ends with a part of one. So neither the template (which would
split an answer at `</think>`) nor the tokenizer reads input text as a special token. Afterwards the rendered prompt is
split at its special tokens, which all come from the template. Pieces with a mark lose it and are encoded as plain text;
the others are encoded normally.

A mark is ASCII without white space, letters and quotes, so JSON, repr, trimming and changes of case keep it. It is
random, so a client cannot guess it.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import RequestError


class Spellings:
    """Finds and marks the spellings of a tokenizer's special tokens in texts."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._begun = tuple({token[:i] for token in tokens for i in range(1, len(token))})
        ends = {token[i:] for token in tokens for i in range(1, len(token))}
        # Alphanumeric rests are left out: else "kind" would be marked, as "/nothin" + "k" is a special token.
        self._rests = tuple(end for end in ends if not end.isalnum())
        longest_first = sorted(tokens, key=len, reverse=True)
        self._tokens_or_text = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if tokens else None

    def marked(self, text: str, mark: str) -> str:
        """The text with marks. None is placed next to outer white space, which templates trim."""
        spelled = [token for token in self._tokens if token in text]
        if spelled:  # spellings may overlap, so every position is checked
            text = re.sub(f"(?s)(?={'|'.join(map(re.escape, spelled))}).", lambda hit: hit[0] + mark, text)
        begun = text.rstrip()
        if begun.endswith(self._begun):
            text = begun + mark + text[len(begun) :]
        rest = text.lstrip()
        return text[: len(text) - len(rest)] + mark + rest if rest.startswith(self._rests) else text

    def cut(self, prompt: str) -> list[str]:
        """Split a prompt into alternating texts and special tokens, beginning and ending with a text."""
        return [prompt] if self._tokens_or_text is None else self._tokens_or_text.split(prompt)


class Guard:
    """Marks the input of one prompt. `of` None: no marks, so special tokens in messages become these tokens."""

    def __init__(self, tokenizer: Tokenizer | None, of: Spellings | None) -> None:
        self._tokenizer, self._of = tokenizer, of
        self._mark = f"~{secrets.randbelow(10**18):018}~"

    def marked(self, value: Any) -> Any:
        """A copy of a JSON value, such as messages or tools, with marks in all its texts."""
        if self._of is None:
            return value
        try:
            return _with_texts(value, partial(self._of.marked, mark=self._mark))
        except RecursionError:
            raise RequestError("messages and tools must not be nested that deeply", "messages") from None

    def text(self, prompt: str) -> str:
        """The prompt without marks."""
        return prompt.replace(self._mark, "")

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt that was rendered from marked values."""
        assert self._tokenizer is not None, "ids need a tokenizer"
        if self._of is None or self._mark not in prompt:
            return self._tokenizer.encode(prompt)
        ids: list[int] = []
        unmarked: list[str] = []
        for piece in self._of.cut(prompt):
            if self._mark in piece:
                ids += self._tokenizer.encode("".join(unmarked))
                ids += self._tokenizer.encode(self.text(piece), allow_special=False)
                unmarked = []
            else:
                unmarked.append(piece)
        return ids + self._tokenizer.encode("".join(unmarked))


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with_texts(key, change): _with_texts(item, change) for key, item in value.items()}
    return [_with_texts(item, change) for item in value] if isinstance(value, (list, tuple)) else value
