"""The hidden number with a tool that crashes. Each way to crash is an action: it is told, counted and costs a turn.

`Excluding` is the control: a crash fails the episode, and its rollout is left out.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from glm5.rl.environments.guess import HIGHEST, Guess, GuessEpisode
from glm5.rl.environments.protocol import EpisodeFailed, Reply, Task, Turn
from glm5.rl.sandbox.choice import choose_backend
from glm5.rl.sandbox.sandbox import Limits, Sandbox
from tests.unit.rl.hostile_guess import IS_WORKER

TOOLS: dict[str, Any] = {
    "raise": b"raise RuntimeError",
    "hang": b"import signal\nsignal.pause()",
    "memory": b"import os\nos.fork()\nheld = bytearray(5 * 10**7)\nwhile True: pass",
    "kill": b"import os, signal\nos.kill(0, signal.SIGKILL)",
    "null": None,
}
"""By action: the program that the tool runs; the last one is no program at all."""
CAUSES = {"raise": "exit 1", "hang": "time-out", "memory": "memory", "kill": "exit -9", "null": "arguments"}


@cache
def cause_of(action: str) -> str:
    """Run the tool in a box; returns how it ended. It ends so each time, so it runs once for each process."""
    backend = choose_backend()
    with Sandbox(backend, Limits(memory_mb=64)) as box:
        try:
            box.write("tool.py", TOOLS[action])
        except TypeError:
            return "arguments"
        done = box.run([backend.python, "-B", "tool.py"], timeout=4.0)
    return f"exit {done.exit_code}" if done.ended_by == "exit" else done.ended_by


class Crashing(Guess):
    def reset(self, task: Task) -> "CrashingEpisode":
        return CrashingEpisode(task, can_crash=False)

    def random_reply(self, task: Task, random: Random, asked: str) -> Reply:
        """One of 19 crashes."""
        return Reply(random.choice([*map(str, range(1, HIGHEST + 1))] * 6 + [*TOOLS]))


class CrashingEpisode(GuessEpisode):
    def __init__(self, task: Task, *, can_crash: bool) -> None:
        super().__init__(task, can_crash=can_crash)
        self._causes = Counter[str]()

    def step(self, reply: Reply) -> Turn:
        turn = super().step(reply)
        counts = {f"crash/{cause}": float(self._causes[cause]) for cause in CAUSES.values()}
        return replace(turn, metrics={**turn.metrics, **counts, "crashed": float(bool(self._causes))})

    def _answer(self, said: str) -> str:
        if said in TOOLS:
            self._causes[cause_of(said)] += 1
            raise RuntimeError(said)
        return super()._answer(said)


class Excluding(Crashing):
    def reset(self, task: Task) -> "ExcludingEpisode":
        return ExcludingEpisode(task, can_crash=False)


class ExcludingEpisode(CrashingEpisode):
    def step(self, reply: Reply) -> Turn:
        if IS_WORKER and reply.content.strip() in TOOLS:  # the warm start plays in the run's own process
            raise EpisodeFailed("sandbox", "crashed")
        return super().step(reply)
