"""A ladder of levels: one up when the mean reward there is high enough."""

from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW = 64


class Ladder:
    """`levels`: their number. Up from a mean of `up` on, of the last WINDOW rewards at the level, which are forgotten
    at a change. Rewards of other levels, which come late, do not count."""

    def __init__(self, levels: int, *, up: float, start: int = 0) -> None:
        self.level, self._levels, self._up = start, levels, up
        self._rewards = deque[float](maxlen=WINDOW)

    def add(self, level: int, reward: float) -> None:
        """Count a rollout's reward."""
        if level != self.level:
            return
        self._rewards.append(reward)
        if len(self._rewards) == WINDOW and sum(self._rewards) >= self._up * WINDOW and level + 1 < self._levels:
            self.level += 1
            self._rewards.clear()

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs."""
        return {"level": self.level, "rewards": list(self._rewards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level, self._rewards = state["level"], deque(state["rewards"], WINDOW)
