"""Reverse or sort a row of digits. Levels by length: 4, 8, 12, 16.

The reward is the share of places that are right (1.0 is the optimum), of the longer of the two rows: adding digits does
not pay.
"""

from collections.abc import Sequence
from random import Random
from typing import Literal

from glm5.rl.environments.protocol import Playable, Reply, Task, Turn
from glm5.rl.environments.single_turn import SingleTurn

LENGTHS = (4, 8, 12, 16)
_STEP = 6_180_339_887_498_949  # coprime to 10: seeds walk through all rows of a length, far apart


class Digits(Playable):
    """`kind`: what to do with them. The first 10 ** length seeds of a level are all different rows."""

    levels, is_quick = len(LENGTHS), True

    def __init__(self, kind: Literal["reverse", "sort"]) -> None:
        self.name, self._kind = kind, kind

    def task(self, seed: int, level: int) -> Task:
        length = LENGTHS[level]
        digits = f"{(seed * _STEP + 31_415_926_535) % 10**length:0{length}}"
        wanted = digits[::-1] if self._kind == "reverse" else "".join(sorted(digits))
        asked = {"role": "user", "content": f"{self._kind.capitalize()} {digits}"}
        return Task(self.name, seed, level, (asked,), {"digits": digits, "wanted": wanted})

    def reset(self, task: Task) -> SingleTurn:
        return SingleTurn(task, lambda reply: _scored(reply, task.data["wanted"]))

    def oracle(self, task: Task) -> Sequence[Reply]:
        return [Reply(task.data["wanted"])]

    def random_reply(self, task: Task, random: Random, asked: str) -> Reply:
        return Reply("".join(random.sample(task.data["digits"], len(task.data["digits"]))))


def _scored(reply: Reply, wanted: str) -> Turn:
    said = reply.content.strip()
    right = sum(map(str.__eq__, said, wanted)) / max(len(said), len(wanted))
    return Turn(is_done=True, rewards={"places": right}, metrics={"exact": float(said == wanted)})
