"""Hidden numbers whose environment fails."""

import os

from glm5.rl.environments.guess import Guess, GuessEpisode
from glm5.rl.environments.protocol import Reply, Task, Turn


class Dying(Guess):
    """Its process ends at the first reply of one task."""

    def reset(self, task: Task) -> GuessEpisode:
        return _DyingEpisode(task, can_crash=False)


class _DyingEpisode(GuessEpisode):
    def step(self, reply: Reply) -> Turn:
        if self._number == 3:
            os._exit(1)
        return super().step(reply)


class NotANumber(Guess):
    """Its rewards are NaN."""

    def reset(self, task: Task) -> GuessEpisode:
        return _NotANumberEpisode(task, can_crash=False)


class _NotANumberEpisode(GuessEpisode):
    def step(self, reply: Reply) -> Turn:
        turn = super().step(reply)
        return Turn(is_done=True, rewards={"hit": float("nan")}) if turn.is_done else turn
