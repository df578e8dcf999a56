"""What messages say, kept from becoming special tokens.

Before the template runs, a mark is put behind the first character of every special token that a message, a tool or a
request's own keyword spells, and where a text ends or begins with a part of one. So nothing that comes from outside
reads as a token, to the template (which would split an answer at `</think>`) as little as to the tokenizer. Afterwards
the prompt is cut at its special tokens, which are the template's own. Pieces with a mark lose it and are encoded as
plain text; all else is encoded as it always is.

A mark is ASCII without white space, letters and quotes: it outlasts JSON, repr, trimming and changes of case. It is
random, so nobody can write it.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import RequestError


class Spellings:
    """How texts can spell a tokenizer's special tokens."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._begun = tuple({token[:i] for token in tokens for i in range(1, len(token))})
        ends = {token[i:] for token in tokens for i in range(1, len(token))}
        # A text that begins with a letter is no token's rest: "kind" would follow a template's "/nothin".
        self._rests = tuple(end for end in ends if not end.isalnum())
        longest_first = sorted(tokens, key=len, reverse=True)
        self._tokens_or_text = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if tokens else None

    def marked(self, text: str, mark: str) -> str:
        """The text with marks, of which none is at its white space: templates trim that."""
        spelled = [token for token in self._tokens if token in text]
        if spelled:  # they may overlap, so each place is looked at
            text = re.sub(f"(?s)(?={'|'.join(map(re.escape, spelled))}).", lambda hit: hit[0] + mark, text)
        begun = text.rstrip()
        if begun.endswith(self._begun):
            text = begun + mark + text[len(begun) :]
        rest = text.lstrip()
        return text[: len(text) - len(rest)] + mark + rest if rest.startswith(self._rests) else text

    def cut(self, prompt: str) -> list[str]:
        """Texts and special tokens in turn; it begins and ends with a text."""
        return [prompt] if self._tokens_or_text is None else self._tokens_or_text.split(prompt)


class Guard:
    """The marks of one prompt. `of` none: nothing is marked, and special tokens are read wherever they are spelled."""

    def __init__(self, tokenizer: Tokenizer | None, of: Spellings | None) -> None:
        self._tokenizer, self._of = tokenizer, of
        self._mark = f"~{secrets.randbelow(10**18):018}~"

    def marked(self, value: Any) -> Any:
        """A copy of messages, tools or whatever JSON holds, with marks in all its texts."""
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
        """Ids of what was rendered from marked values."""
        assert self._tokenizer is not None, "ids need a tokenizer"
        if self._of is None or self._mark not in prompt:
            return self._tokenizer.encode(prompt)
        ids: list[int] = []
        as_always: list[str] = []
        for piece in self._of.cut(prompt):
            if self._mark in piece:
                ids += self._tokenizer.encode("".join(as_always))
                ids += self._tokenizer.encode(self.text(piece), allow_special=False)
                as_always = []
            else:
                as_always.append(piece)
        return ids + self._tokenizer.encode("".join(as_always))


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with_texts(key, change): _with_texts(item, change) for key, item in value.items()}
    return [_with_texts(item, change) for item in value] if isinstance(value, (list, tuple)) else value
