"""Incremental detokenization: text from token ids as they arrive, in complete characters.

A byte-level token is a string of bytes, and a character may be spread over several tokens. The bytes
of an unfinished character are held back, so text that was returned never changes. The cost of a token depends
only on its own length. All pieces and `finish()` together equal `Tokenizer.decode`.
"""

import codecs
from collections.abc import Callable


def byte_alphabet() -> dict[str, int]:
    """Maps printable characters to the bytes that they represent in byte-level vocabularies.

    A byte that is a visible Latin-1 character stands for itself; the others take the code points from
    256 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TextStream:
    """The text of one answer. `token_bytes` returns the bytes of a token id (empty for ids without text)."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Text that is certain after one more token: "" while a character is unfinished."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut off, else ""."""
        return self._decoder.decode(b"", final=True)
