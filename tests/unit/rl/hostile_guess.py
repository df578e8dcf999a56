"""Hidden numbers whose environment fails."""

import os
import sys

from glm5.rl.environments.guess import Guess, GuessEpisode
from glm5.rl.environments.protocol import Reply, Task, Turn

IS_WORKER = getattr(sys.modules["__main__"].__spec__, "name", "") == "glm5.rl.environments.worker"


class Dying(Guess):
    """A worker ends at the first reply to the tasks of one number."""

    def reset(self, task: Task) -> GuessEpisode:
        return _DyingEpisode(task, can_crash=False)


class _DyingEpisode(GuessEpisode):
    def step(self, reply: Reply) -> Turn:
        if self._number == 3 and IS_WORKER:
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
