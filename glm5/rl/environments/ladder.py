"""A ladder of levels: one up when the mean reward there is high enough, one down when it is low."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from glm5.common.errors import ConfigError

UP, DOWN, WINDOW = 0.8, 0.2, 64


class Ladder:
    """`levels`: their number. Up from a mean of `up` on, down from `down` on, of the last `window` rewards at the
    level, which are forgotten at a change. Rewards of other levels, which come late, do not count."""

    def __init__(
        self, levels: int, *, up: float = UP, down: float = DOWN, window: int = WINDOW, start: int = 0
    ) -> None:
        if not (down < up and window > 0 and 0 <= start < levels):
            raise ConfigError(
                f"a ladder of {levels} levels: {down=} must be below {up=}, {window=} above 0, {start=} below {levels}"
            )
        self.level, self._levels, self._up, self._down = start, levels, up, down
        self._rewards = deque[float](maxlen=window)

    def add(self, level: int, reward: float) -> None:
        """Count a rollout's reward."""
        if level != self.level:
            return
        self._rewards.append(reward)
        if len(self._rewards) < (self._rewards.maxlen or 0):
            return
        mean = sum(self._rewards) / len(self._rewards)
        step = (mean >= self._up) - (mean <= self._down)
        if 0 <= self.level + step < self._levels and step:
            self.level += step
            self._rewards.clear()

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs."""
        return {"level": self.level, "rewards": list(self._rewards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level, self._rewards = state["level"], deque(state["rewards"], self._rewards.maxlen)
