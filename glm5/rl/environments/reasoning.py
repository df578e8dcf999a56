"""The datasets of the package reasoning-gym, as environments "reasoning-gym/NAME" (extra: reasoning-gym).

Task `seed` of a dataset is its entry of that seed; the package's own scores are the rewards, from 0 to 1. Its questions
are English sentences, for models that read them.
"""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from glm5.common.errors import ConfigError
from glm5.common.extras import require
from glm5.rl.environments.protocol import Environment, Reply, Task, Turn
from glm5.rl.environments.single_turn import SingleTurn

PREFIX = "reasoning-gym/"
ENDING = "\n\nGive the answer alone in the last line, after 'Answer:'."
SIZE = 2**31
"""Entries of a dataset: entry i is made of seed i, when it is asked for."""


class Reasoning(Environment):
    """One dataset, with its default settings: one level. Raises MissingExtra, and ConfigError for unknown names."""

    def __init__(self, name: str) -> None:
        package: Any = require("reasoning_gym", "reasoning-gym")
        known = sorted(package.factory.DATASETS)
        if name not in known:
            near = get_close_matches(name, known, n=1)
            told = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"reasoning-gym has no dataset {name!r:.80}; {told}")
        self.name = PREFIX + name
        self._dataset = package.create_dataset(name, seed=0, size=SIZE)

    def task(self, seed: int, level: int) -> Task:
        entry = self._dataset[seed % SIZE]
        # The package's metadata may hold tuples, dates and the like: what JSON has no form for is spelled.
        data = json.loads(json.dumps({"answer": entry["answer"]}, default=str))
        asked = {"role": "user", "content": entry["question"] + ENDING}
        return Task(self.name, seed, level, (asked,), data)

    def reset(self, task: Task) -> SingleTurn:
        return SingleTurn(task, lambda reply: self._scored(reply, task))

    def oracle(self, task: Task) -> Sequence[Reply]:
        return [Reply(f"Answer: {task.data['answer']}")]

    def _scored(self, reply: Reply, task: Task) -> Turn:
        answer = reply.content.rpartition("Answer:")[2].strip()
        # The entry anew, as scores read its metadata.
        score = self._dataset.score_answer(answer, self._dataset[task.seed % SIZE]) if answer else 0.0
        return Turn(is_done=True, rewards={"score": float(score)})
