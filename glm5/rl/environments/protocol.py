"""What an environment is: tasks by seed, and episodes of messages that end with a reward.

    task    = environment.task(seed, level)           the same for the same arguments, on every machine
    episode = environment.reset(task)                 `episode.messages`: what the policy is asked first
    turn    = episode.step(reply)                     what the environment answers, until `turn.is_done`
    rewards = environment.score_group(...)            optional: rewards that depend on all rollouts of a group

In self-play one policy takes every seat, each with a conversation of its own that hides what the others know.

An episode runs in a worker process (`workers.py`). What the action causes (bad arguments, its own time-outs, its own
memory) is an observation or a reward of 0: crashing must never pay. Only faults that it did not cause raise
`EpisodeFailed`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol

from glm5.common.bounded import TABLES, read_bounded_text
from glm5.common.errors import ConfigError

LEFT_OUT = "left-out.txt"
"""File beside tasks with a key a line, which `glm5 env check` writes."""
Message = Mapping[str, Any]
"""A chat message as the chat template takes it: role, content, and tool_calls or tool_call_id where they apply."""


def with_system(system: str, messages: Sequence[Message]) -> list[Message]:
    """The first messages of a conversation, after a system message with this text unless it is empty."""
    return [{"role": "system", "content": system}, *messages] if system else list(messages)


FailureKind = Literal["provider", "harness", "tool", "sandbox", "task", "environment", "stale"]
EXCLUDED: tuple[FailureKind, ...] = ("provider", "sandbox", "environment", "stale")
"""Failures that exclude a rollout from its group; "stale": sampled with weights that are too old for the step. The
others are the policy's own, or the task's (reward 0)."""


class EpisodeFailed(Exception):
    """An episode that could not go on, for a reason that the action did not cause."""

    def __init__(self, kind: FailureKind, reason: str):
        super().__init__(reason)
        self.kind: FailureKind = kind
        self.reason = reason


@dataclass(frozen=True)
class Task:
    """One problem. `data`: what the environment needs to check an answer, plain JSON; never shown to the policy."""

    environment: str
    seed: int
    level: int
    messages: tuple[Message, ...]
    data: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...] = ()

    @cached_property
    def key(self) -> str:
        """A stable hash of all that the task consists of but its seed: equal tasks have equal keys."""
        parts = [self.environment, self.level, list(self.messages), dict(self.data), list(self.tools)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Reply:
    """What the policy said in one turn, parsed by the chat parser. `is_truncated`: it ran out of tokens."""

    content: str
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    is_truncated: bool = False


@dataclass(frozen=True)
class Turn:
    """What an environment answers: messages for the policy, or the end with rewards in named parts, whose sum is the
    reward. `metrics`: figures that are shown but not rewarded.

    In self-play, `messages` join (or begin) the conversation of `seat`, which replies next; an episode begins with
    seat 0. `rewards` are those of seat 0, `seat_rewards` those of seats 1, 2, ...
    """

    messages: tuple[Message, ...] = ()
    is_done: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    seat: int = 0
    seat_rewards: tuple[Mapping[str, float], ...] = ()


class Episode(Protocol):
    """One attempt at a task. `messages`: what the policy (in self-play: seat 0) is asked first."""

    messages: Sequence[Message]

    def step(self, reply: Reply) -> Turn:
        """Answer a reply. Raises EpisodeFailed."""
        ...

    def close(self) -> None:
        """Give back what the episode holds, such as a sandbox. It may be called at any time, and twice."""


class Environment(Protocol):
    """Tasks and their episodes; implementations inherit the defaults.

    `levels`: number of levels of difficulty, 0 the easiest. `num_turns`: the most replies of an episode, of all seats
    together. `sandbox_levels`: those whose tasks run what the policy writes. `is_quick`: whether every answer at the
    other levels is computed in far less than a millisecond and waits for nothing, so that a worker may give many in one
    go; `begins_quickly`: whether `reset` does, at all levels. `folder`: where its tasks lie, if in one; it gives none
    whose key is in `left_out` of it. An object serves many episodes at once, from several threads: it keeps no state of
    theirs.
    """

    name: str
    levels: int = 1
    num_turns: int = 1
    folder: str = ""
    num_seats: int = 1
    sandbox_levels: Sequence[int] = ()
    is_quick: bool = False
    begins_quickly: bool = False

    def task(self, seed: int, level: int) -> Task:
        """Any seed from 0 is a task; `level` from 0 to `levels` - 1."""
        ...

    def reset(self, task: Task) -> Episode:
        """Begin an episode. Raises EpisodeFailed."""
        ...

    def oracle(self, task: Task) -> Sequence[Reply]:
        """Replies that earn the most that the task gives."""
        ...

    def unsolved(self, task: Task) -> Sequence[Reply]:
        """Replies that do something, but solve nothing: they must earn 0."""
        return [Reply("I do not know.")]

    def hidden(self, task: Task) -> Sequence[str]:
        """Texts, such as lines of tests and of the solution, that no file of the policy's box may contain."""
        return ()

    def score_group(self, task: Task, rewards: Sequence[float]) -> Sequence[float]:
        """Rewards of a group's rollouts that depend on each other."""
        return rewards


def left_out(folder: str | Path) -> frozenset[str]:
    """Keys of the tasks in a folder that have not passed `glm5 env check`. Raises ConfigError, OSError."""
    file = Path(folder) / LEFT_OUT
    return frozenset(read_bounded_text(file, TABLES, ConfigError).split() if file.exists() else ())


class Playable(Environment, Protocol):
    """An environment for models that know no language: random replies teach them the form, and nothing else."""

    def random_reply(self, task: Task, random: Random, asked: str) -> Reply:
        """A legal reply to a message that says `asked`, which may be the request of a summary."""
        ...


class Comparing(Playable, Protocol):
    """One of a single turn that knows which of two answers people prefer, which is not always the better one."""

    def prefers(self, task: Task, one: str, other: str, random: Random) -> bool:
        """Whether a person prefers `one` to `other`."""
        ...
