"""Opaque reasoning that clients send back unchanged: Anthropic's `signature`, OpenAI's `encrypted_content`.

It is encoded, not encrypted or signed. Reasoning that the response shows is accepted without verification; reasoning
that it omits is contained in the opaque text.
"""

import base64
import hashlib

_TEXT, _MARK = "glm5.text.", "glm5.mark."


def encrypt(text: str) -> str:
    """Encode reasoning that the response does not show."""
    return _TEXT + base64.urlsafe_b64encode(text.encode(errors="surrogatepass")).decode()


def decrypt(encrypted: str) -> str | None:
    """Decode `encrypt`; None for a `mark`, and for text from another server."""
    if not encrypted.startswith(_TEXT):
        return None
    try:
        return base64.urlsafe_b64decode(encrypted.removeprefix(_TEXT)).decode(errors="surrogatepass")
    except ValueError:
        return None


def mark(text: str) -> str:
    """A signature for reasoning that the response shows."""
    return _MARK + hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=24).hexdigest()
