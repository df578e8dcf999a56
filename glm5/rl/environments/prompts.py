"""The three dimensions of general RL, each with prompts of its own (prompts.toml): correctness (logic, invented facts,
safety), emotional quality, and task quality (creative writing, text processing, translation, role-play).

Rules check little of an answer: a word that must be said, a form, a length. The task's rubric is for the judge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from glm5.rl.environments.families import Level, read_levels
from glm5.rl.environments.instruction_kinds import KINDS, SENTENCES, words
from glm5.rl.environments.instructions import followed
from glm5.rl.environments.protocol import Environment, Reply, Task, Turn
from glm5.rl.environments.single_turn import SingleTurn

Dimension = Literal["correctness", "emotional", "quality"]
_ORDER: tuple[Dimension, ...] = ("correctness", "emotional", "quality")


@dataclass(frozen=True)
class Prompt:
    """`arguments`: what the rule checks, as of `instructions.followed`; `answer`: a word that must be said."""

    text: str
    rubric: str
    arguments: Sequence[Any]
    answer: str = ""


@cache
def _levels() -> list[Level]:
    return read_levels("prompts", Prompt)


class Prompts(Environment):
    """Prompts of a dimension: reward 1 where the rule is kept, else 0."""

    is_quick = True

    def __init__(self, name: Dimension) -> None:
        self.name, self._level = name, _levels()[_ORDER.index(name)]

    def task(self, seed: int, level: int) -> Task:
        made: Prompt = self._level.made(seed)
        data = {"instructions": list(made.arguments), "answer": made.answer, "rubric": made.rubric}
        return Task(self.name, seed, level, ({"role": "user", "content": made.text},), data)

    def reset(self, task: Task) -> SingleTurn:
        return SingleTurn(task, lambda reply: _scored(reply, task))

    def oracle(self, task: Task) -> Sequence[Reply]:
        text = f"It is {task.data['answer']}." if task.data["answer"] else SENTENCES["English"]
        for name, point in task.data["instructions"]:
            text = KINDS[name].follow(text, point)
        return [Reply(text)]


def _scored(reply: Reply, task: Task) -> Turn:
    said, answer = [word.lower() for word in words(reply.content)], task.data["answer"].lower()
    is_kept = followed(reply.content, task.data["instructions"]) == 1 and (not answer or answer in said)
    return Turn(is_done=True, rewards={"rules": float(is_kept)})
