"""What travels between a training process and its environment workers: lines of JSON, bounded in size.

request   {"id", "op": start | task | reset | step | close | score_group | batch, ...}
answer    {"id", "value"} or {"id", "failed": [kind, reason]}
batch     "requests": requests without ids; "value": a list of answers without ids
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from glm5.rl.environments.protocol import Reply, Task, Turn

MAX_FRAME = 8 * 2**20
"""Bytes of a line."""


class TooLarge(Exception):
    """A message of more than MAX_FRAME bytes."""


def frame(message: Mapping[str, Any]) -> bytes:
    """A message as bytes. Raises TooLarge."""
    line = json.dumps(message).encode() + b"\n"
    if len(line) > MAX_FRAME:
        raise TooLarge(f"a message of {len(line)} bytes; allowed are {MAX_FRAME}")
    return line


def batch_frame(number: int, requests: Sequence[str]) -> bytes:
    """A batch of requests that are JSON already, and that together are short enough."""
    return f'{{"id": {number}, "op": "batch", "requests": [{", ".join(requests)}]}}\n'.encode()


def as_json(value: Task | Reply | Turn) -> dict[str, Any]:
    """A message's part: the fields."""
    return {name: getattr(value, name) for name in value.__match_args__}


def as_task(value: Mapping[str, Any]) -> Task:
    return Task(**{**value, "messages": tuple(value["messages"]), "tools": tuple(value["tools"])})


def as_turn(value: Mapping[str, Any]) -> Turn:
    """Raises ValueError where a reward is no finite number."""
    turn = Turn(**{**value, "messages": tuple(value["messages"]), "seat_rewards": tuple(value["seat_rewards"])})
    for parts in (turn.rewards, *turn.seat_rewards):
        for name, reward in parts.items():
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise ValueError(f"reward {name} is {reward!r}, not a finite number")
    return turn
