"""Reasoning for clients that pass it back unread: Anthropic's `signature`, OpenAI's `encrypted_content`.

Nothing in it is secret, and nothing is proven by it: reasoning that was shown is taken back as it comes, and reasoning
that was not shown travels within.
"""

import base64
import hashlib

_TEXT, _MARK = "glm5.text.", "glm5.mark."


def seal(text: str) -> str:
    """The text, not to be read."""
    return _TEXT + base64.urlsafe_b64encode(text.encode(errors="surrogatepass")).decode()


def unseal(sealed: str) -> str | None:
    """What was sealed; None for a mark, and for what another server made."""
    if not sealed.startswith(_TEXT):
        return None
    try:
        return base64.urlsafe_b64decode(sealed.removeprefix(_TEXT)).decode(errors="surrogatepass")
    except ValueError:
        return None


def mark(text: str) -> str:
    """A signature of text that is shown beside it."""
    return _MARK + hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=24).hexdigest()
