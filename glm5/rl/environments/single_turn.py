"""An episode of one reply."""

from collections.abc import Callable, Sequence

from glm5.rl.environments.protocol import Message, Reply, Task, Turn


class SingleTurn:
    """Asks, and scores the reply."""

    def __init__(self, task: Task, score: Callable[[Reply], Turn]) -> None:
        self.messages: Sequence[Message] = task.messages
        self._score = score

    def step(self, reply: Reply) -> Turn:
        return self._score(reply)

    def close(self) -> None:
        pass
