"""The hidden number: 1 to 15 within four guesses, each answered by whether the number is lower or higher.

Binary search always hits (reward 1). Whoever ignores the answers hits at most 4 of the 15 numbers: 4/15 = 0.267. More
than that shows that the policy uses what the environment says.

`guess-crash` has a second action, which crashes. The crash is answered and costs a turn, so that it never pays.
"""

import re
from collections.abc import Sequence
from random import Random

from glm5.rl.environments.protocol import Episode, Playable, Reply, Task, Turn

HIGHEST, NUM_GUESSES = 15, 4
IGNORING_ANSWERS = NUM_GUESSES / HIGHEST
"""The most that a policy earns without the answers."""
CRASH = "crash"


class Guess(Playable):
    """Seeds 0 to 14 are the 15 numbers, and so on in turn. An illegal guess ends the episode with reward 0."""

    num_turns, is_quick = NUM_GUESSES, True

    def __init__(self, *, can_crash: bool = False) -> None:
        self.name, self.can_crash = "guess-crash" if can_crash else "guess", can_crash

    def task(self, seed: int, level: int) -> Task:
        asked = f"Guess 1 to {HIGHEST}" + (f" or {CRASH}" if self.can_crash else "")
        return Task(self.name, seed, level, ({"role": "user", "content": asked},), {"number": 1 + seed % HIGHEST})

    def reset(self, task: Task) -> "GuessEpisode":
        return GuessEpisode(task, can_crash=self.can_crash)

    def oracle(self, task: Task) -> Sequence[Reply]:
        low, high, guesses = 1, HIGHEST, list[int]()
        while not guesses or guesses[-1] != task.data["number"]:
            guesses.append((low + high) // 2)
            low, high = (guesses[-1] + 1, high) if task.data["number"] > guesses[-1] else (low, guesses[-1] - 1)
        return [Reply(str(guess)) for guess in guesses]

    def random_reply(self, task: Task, random: Random, asked: str) -> Reply:
        actions = [str(number) for number in range(1, HIGHEST + 1)] + [CRASH] * self.can_crash
        return Reply(random.choice(actions))


class GuessEpisode(Episode):
    """One game."""

    def __init__(self, task: Task, *, can_crash: bool) -> None:
        self.messages = task.messages
        self._number: int = task.data["number"]
        self._can_crash, self._num_replies, self._num_crashes = can_crash, 0, 0

    def step(self, reply: Reply) -> Turn:
        self._num_replies += 1
        said = reply.content.strip()
        try:
            answer = self._answer("" if reply.is_truncated else said)
        except Exception:  # noqa: BLE001 - the action's own fault, whatever it raises
            answer, self._num_crashes = "error", self._num_crashes + 1
        is_over = answer in ("equal", "illegal") or self._num_replies == NUM_GUESSES
        if not is_over:
            return Turn(({"role": "user", "content": answer},))
        metrics = {"guesses": self._num_replies, "illegal": answer == "illegal", "crashes": self._num_crashes}
        return Turn(
            is_done=True,
            rewards={"hit": float(answer == "equal")},
            metrics={name: float(value) for name, value in metrics.items()},
        )

    def _answer(self, said: str) -> str:
        if self._can_crash and said == CRASH:
            raise RuntimeError("crashed")
        if not re.fullmatch("[1-9][0-9]?", said) or int(said) > HIGHEST:
            return "illegal"
        return "equal" if int(said) == self._number else "lower" if self._number < int(said) else "higher"
