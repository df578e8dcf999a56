"""When two messages are the same: by what they say, not by how they are written.

arguments of calls     equal as JSON
text of a reply        equal but for white space around it: clients trim
reasoning of a reply   equal where the client sends it; most leave it out
ids of calls           not compared in a reply, whose ids the server has made
everything else        equal
"""

import json
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]


def key_of(message: Message) -> str:
    """The same for messages of the environment or user that say the same, and of replies."""
    if message["role"] == "assistant":
        return _plain([_said(message), message.get("reasoning_content", "").strip()])
    return _plain({name: value for name, value in message.items() if value not in (None, "", [])})


def is_reply(message: Message, reply: Message) -> bool:
    """Whether a message that a client sends is the sampled `reply`."""
    if message["role"] != "assistant" or _said(message) != _said(reply):
        return False
    given = message.get("reasoning_content", "").strip()
    return not given or given == reply.get("reasoning_content", "").strip()


def setting_key(tools: Any, options: Mapping[str, Any]) -> str:
    """Of what a template renders beside messages."""
    return _plain([tools, dict(options)])


def _said(message: Message) -> str:
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    return _plain([content.strip() if isinstance(content, str) else content, calls])


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)
