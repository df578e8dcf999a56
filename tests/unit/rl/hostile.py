"""Environments that misbehave in a worker, by what the reply says."""

import os
import sys
import threading
from collections.abc import Sequence

from glm5.rl.environments.guess import Guess, GuessEpisode
from glm5.rl.environments.protocol import EpisodeFailed, Reply, Task, Turn
from glm5.rl.environments.wire import MAX_FRAME


class Hostile(Guess):
    def reset(self, task: Task) -> GuessEpisode:
        return HostileEpisode(task, can_crash=False)

    def score_group(self, task: Task, rewards: Sequence[float]) -> Sequence[float]:
        return [reward - min(rewards) for reward in rewards]


class HostileEpisode(GuessEpisode):
    def step(self, reply: Reply) -> Turn:
        match reply.content:
            case "hang":
                threading.Event().wait()
            case "die":
                os._exit(3)
            case "raise":
                raise ZeroDivisionError("a bug")
            case "sandbox":
                raise EpisodeFailed("sandbox", "no space")
            case "large":
                return Turn(({"role": "user", "content": "x" * MAX_FRAME},))
            case "nan":
                return Turn(is_done=True, rewards={"hit": float("nan")})
            case "print":
                print("noise")
                sys.stdout.flush()
        return super().step(reply)


def no_environment() -> Hostile:
    raise ValueError("not today")
