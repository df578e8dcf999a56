"""Requests from a file: JSON lines, or one JSON list, of these shapes, which may be mixed.

    {"messages": [...], "tools": [...]}                 OpenAI's; an assistant's last message is left out
    {"prompt": "text"} or {"prompt": [1, 2, 3]}         text or token ids
    {"conversations": [{"from", "value"}, ...]}         ShareGPT: the first question, its reply gives the length
    {"input_length": 900, "output_length": 50, "hash_ids": [...]}     Mooncake's traces: random texts of that
                                                        length; equal hashes give equal blocks of 512 tokens

The maximum length of an answer is `max_tokens`, `max_completion_tokens`, `output_tokens`, `output_len` or
`output_length` of the line, else the length of a ShareGPT reply, else 256. Without a tokenizer four characters of a
reply count as one token.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm5.bench.serve.api_formats import Message, Prompt
from glm5.bench.serve.texts import Source
from glm5.bench.serve.workload import Conversation, Turn
from glm5.common.errors import ConfigError

DEFAULT_OUTPUT, BLOCK = 256, 512
LENGTHS = ("max_tokens", "max_completion_tokens", "output_tokens", "output_len", "output_length")
ALLOWED = "an object with messages, prompt, conversations or input_length"


@dataclass(frozen=True)
class Reader:
    """Turns lines into requests. `count`: the number of tokens of a text; `output_len` applies to all if given."""

    source: Source
    count: Callable[[str], int]
    seed: int
    output_len: int | None = None

    def read(self, path: str) -> list[Conversation]:
        """Every request of a file, in order. Raises ConfigError naming a line that is not a request."""
        return [self._conversation(row, where) for row, where in _rows(path)]

    def _conversation(self, row: Any, where: str) -> Conversation:
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: got {_short(row)}; allowed: {ALLOWED}")
        reply = None
        if "messages" in row:
            prompt: Prompt = _messages(row["messages"], where)
        elif "prompt" in row:
            prompt = _prompt(row["prompt"], where)
        elif "conversations" in row:
            prompt, reply = _first_exchange(row["conversations"], where)
        elif "input_length" in row:
            prompt = self._drawn(row, where)
        else:
            raise ConfigError(f"{where}: got the keys {_short(list(row))}; allowed: {ALLOWED}")
        tools = row.get("tools") or []
        if not isinstance(tools, list):
            raise ConfigError(f"{where}: tools: got {_short(tools)}; allowed: a list")
        return Conversation([Turn(prompt, self._max_tokens(row, reply, where))], tuple(tools))

    def _max_tokens(self, row: dict[str, Any], reply: str | None, where: str) -> int:
        if self.output_len is not None:
            return self.output_len
        for key in LENGTHS:
            if row.get(key) is not None:
                return _checked_int(row[key], f"{where}: {key}")
        return DEFAULT_OUTPUT if reply is None else max(1, self.count(reply))

    def _drawn(self, row: dict[str, Any], where: str) -> str | list[int]:
        wanted = _checked_int(row["input_length"], f"{where}: input_length")
        hashes = row.get("hash_ids") or []
        if not isinstance(hashes, list):
            raise ConfigError(f"{where}: hash_ids: got {_short(hashes)}; allowed: a list")
        left = max(1, wanted - self.source.overhead)
        prompt: Any = None
        for k in range((left + BLOCK - 1) // BLOCK):
            # Blocks without a hash are unique to their line.
            own = (
                [_checked_int(hashes[k], f"{where}: hash_ids", least=0)]
                if k < len(hashes)
                else [wanted, *where.encode()]
            )
            piece = self.source.draw(np.random.default_rng([self.seed, 2, *own]), min(BLOCK, left - k * BLOCK))
            prompt = piece if prompt is None else prompt + piece
        return prompt


def _rows(path: str) -> list[tuple[Any, str]]:
    text = Path(path).read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        rows = _parse(text, path)
        return [(row, f"{path}, entry {number}") for number, row in enumerate(rows, 1)] or _none(path)
    lines = [(line, f"{path}, line {number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [(_parse(line, where), where) for line, where in lines] or _none(path)


def _none(path: str) -> list[tuple[Any, str]]:
    raise ConfigError(f"{path} holds no request")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON ({error})") from None


def _messages(messages: Any, where: str) -> list[Message]:
    if not isinstance(messages, list) or not all(isinstance(part, dict) and "role" in part for part in messages):
        raise ConfigError(f"{where}: messages: got {_short(messages)}; allowed: a list of objects with a role")
    kept = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if not kept:
        raise ConfigError(f"{where}: messages: nothing to answer")
    return kept


def _prompt(prompt: Any, where: str) -> str | list[int]:
    is_ids = isinstance(prompt, list) and all(type(part) is int for part in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise ConfigError(f"{where}: prompt: got {_short(prompt)}; allowed: a text or a list of token ids")
    return prompt


def _first_exchange(turns: Any, where: str) -> tuple[str, str | None]:
    """The first message of a person, and the reply if there is one."""
    try:
        messages = [(turn["from"], str(turn["value"])) for turn in turns]
        at = next(k for k, (who, text) in enumerate(messages) if who in ("human", "user") and text)
    except (TypeError, KeyError, StopIteration):
        raise ConfigError(f"{where}: conversations: got {_short(turns)}; allowed: from human, value TEXT") from None
    reply = messages[at + 1][1] if at + 1 < len(messages) else None
    return messages[at][1], reply


def _checked_int(value: Any, where: str, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ConfigError(f"{where}: got {_short(value)}; allowed: a whole number, at least {least}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
