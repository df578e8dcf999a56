"""An episode of one reply."""

from collections.abc import Callable

from glm5.rl.environments.protocol import Episode, Reply, Task, Turn


class SingleTurn(Episode):
    """Asks, and scores the reply."""

    def __init__(self, task: Task, score: Callable[[Reply], Turn]) -> None:
        self.messages = task.messages
        self._score = score

    def step(self, reply: Reply) -> Turn:
        return self._score(reply)
