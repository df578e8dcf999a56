"""How many rollouts are under way at a time, by the use of the engine's KV cache.

    below `low`          grow by a quarter, once for each turnover: as many episodes as are allowed have ended since
    `low` to `high`      stay
    above `high`         shrink in proportion, so that the use would be `low`

A cache that is full makes the engine compute prompts again, which costs more than rollouts that wait.
"""

from dataclasses import dataclass


@dataclass
class AdaptiveConcurrency:
    """`allowed` is between `least` and `most` episodes."""

    allowed: int
    least: int
    most: int
    low: float = 0.6
    high: float = 0.85
    _ended: int = 0

    def episode_ended(self) -> None:
        self._ended += 1

    def observe(self, usage: float) -> None:
        """The share of the cache's pages that are in use by running requests."""
        if usage > self.high:
            self.allowed = max(self.least, int(self.allowed * self.low / usage))
            self._ended = 0
        elif usage < self.low and self._ended >= self.allowed:
            self.allowed = min(self.most, self.allowed + max(1, self.allowed // 4))
            self._ended = 0
