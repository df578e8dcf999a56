"""Incremental detokenization: text from token ids as they arrive, in complete characters.

A byte-level token is a string of bytes, and a character may be spread over several tokens. The bytes
of an unfinished character are held back, so text that was returned never changes. The cost of a token depends
only on its own length. All pieces and `finish()` together equal `Tokenizer.decode`.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Sequence


def byte_alphabet() -> dict[str, int]:
    """Maps printable characters to the bytes that they represent in byte-level vocabularies.

    A byte that is a visible Latin-1 character stands for itself; the others take the code points from
    256 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TextStream:
    """The text of one answer. `token_bytes` returns the bytes of a token id (empty for ids without text).

    `texts` caches the texts of tokens that neither complete nor begin a part of a character; streams with the same
    `token_bytes` may share it.
    """

    __slots__ = ("_held", "_texts", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes], texts: dict[int, str] | None = None) -> None:
        self._token_bytes = token_bytes
        self._texts = {} if texts is None else texts
        self._held = b""  # of an unfinished character

    def feed(self, token_id: int) -> str:
        """Text that is certain after one more token: "" while a character is unfinished."""
        held = self._held
        if not held and (text := self._texts.get(token_id)) is not None:
            return text
        more = held + self._token_bytes(token_id)
        text, used = utf_8_decode(more, "replace")
        self._held = more[used:]
        if text and not held and not self._held:  # ids without text are not cached: there may be any number
            self._texts[token_id] = text
        return text

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """The texts of several tokens, joined."""
        if not self._held:
            try:
                return "".join(map(self._texts.__getitem__, token_ids))
            except KeyError:
                pass
        return "".join(map(self.feed, token_ids))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut off, else ""."""
        held, self._held = self._held, b""
        return held.decode(errors="replace")
