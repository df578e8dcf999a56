"""Contents that spell special tokens, kept from becoming special tokens.

A mark is put inside each spelling before the template runs; encoding cuts the prompt at the marks, and
no piece holds a whole spelling any more. The mark is a Unicode noncharacter, which text never holds.
"""

import re
from collections.abc import Sequence
from typing import Any

from glm5.chat.message import Message
from glm5.chat.tokenizer import Tokenizer

_MARK = "\ufdd0"
_FROM_OUTSIDE = ("user", "tool")


def guard(messages: Sequence[Message], special_tokens: Sequence[str]) -> list[Message]:
    """The messages with a mark inside every special token that user and tool contents spell."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    spelling = re.compile("|".join(re.escape(token) for token in longest_first)) if longest_first else None

    def marked(content: Any) -> Any:
        if isinstance(content, str):
            text = content.replace(_MARK, "")
            return text if spelling is None else spelling.sub(lambda hit: hit[0][0] + _MARK + hit[0][1:], text)
        if isinstance(content, list):
            return [marked(part) for part in content]
        if isinstance(content, dict):
            return content | {key: marked(content[key]) for key in ("text", "output") if key in content}
        return content

    return [
        message | {"content": marked(message["content"])} if message["role"] in _FROM_OUTSIDE else message
        for message in messages
    ]


def encode_guarded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt that was rendered from guarded messages."""
    return [token_id for piece in prompt.split(_MARK) for token_id in tokenizer.encode(piece)]
