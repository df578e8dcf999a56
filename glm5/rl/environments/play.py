"""Plays an episode in this process: with the replies of an oracle, random ones, or any function of a conversation.

For tests, for conversations that a model is first trained on, and for a look at what an environment says.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from random import Random

from glm5.rl.environments.protocol import Environment, Message, Playable, Reply, Task, Turn


@dataclass(frozen=True)
class Played:
    """A finished episode: each seat's conversation, the last turn, and each seat's reward."""

    conversations: list[list[Message]]
    last: Turn

    @property
    def rewards(self) -> list[float]:
        return [sum(parts.values()) for parts in (self.last.rewards, *self.last.seat_rewards)]


def play(
    environment: Environment, task: Task, answer: Callable[[Sequence[Message]], Reply], most: int | None = None
) -> Played:
    """Play to the end, or until `most` replies, the last of which is not answered. `answer`: the reply to a
    conversation, of whichever seat is to reply. Raises EpisodeFailed."""
    conversations: list[list[Message]] = [[] for _ in range(environment.num_seats)]
    with closing(environment.reset(task)) as episode:
        turn = Turn(tuple(episode.messages))
        for number in count(1):
            chat = conversations[turn.seat]
            chat.extend(turn.messages)
            reply = answer(chat)
            chat.append(as_message(reply))
            if number == most or (turn := episode.step(reply)).is_done:
                break
    return Played(conversations, turn)


def play_oracle(environment: Environment, task: Task) -> Played:
    """With the replies that earn the most."""
    replies = iter(environment.oracle(task))
    return play(environment, task, lambda _: next(replies))


def play_solution(environment: Environment, task: Task) -> list[list[Message]]:
    """Each seat's conversation with the replies that earn the most; the last one is not scored, so that a program that
    it holds needs no sandbox. Raises EpisodeFailed."""
    replies = environment.oracle(task)
    coming = iter(replies)
    return play(environment, task, lambda _: next(coming), len(replies)).conversations


def play_randomly(environment: Playable, task: Task, random: Random) -> Played:
    """With random legal replies."""
    return play(environment, task, lambda chat: environment.random_reply(task, random, chat[-1]["content"]))


def as_message(reply: Reply) -> Message:
    """A reply as a message of its conversation."""
    message: dict[str, object] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = list(reply.tool_calls)
    return message
