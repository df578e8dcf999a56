"""A value that is told once, at the first of many steps, and asked for after the last one.

    Remember           ok       what is asked, and the reply to it and to all steps but the last
    b                  ok       the first step: one of two values
    7                  ok       the steps in between, a digit each
    tell               b        the last one; the reward is 1 for the value, else 0

Steps are tools' results, so that compaction (`[rollouts.context]`) leaves them out, and only the policy's own summaries
carry the value on: whoever has forgotten it is right for half of the tasks. A reply other than "ok" on the way ends the
episode with 0, so that nothing is carried on by the replies that are kept beside a summary.
"""

from collections.abc import Sequence
from random import Random

from glm5.rl.environments.protocol import Episode, Playable, Reply, Task, Turn

STEPS = (4, 28, 52, 96)
"""Of each level. With a summary every 24 steps (24, 48, 72), the value passes through 0 to 3 of them."""
VALUES = "ab"
CHANCE = 1 / len(VALUES)
"""What is earned without memory."""
BEGIN, GO_ON, TELL = "Remember", "ok", "tell"


class Memory(Playable):
    """Even seeds keep the first value, odd ones the second."""

    name, levels, num_turns, is_quick = "memory", len(STEPS), STEPS[-1] + 1, True

    def task(self, seed: int, level: int) -> Task:
        digits = Random(f"memory {level} {seed}").choices("0123456789", k=STEPS[level] - 2)
        value = VALUES[seed % len(VALUES)]
        data = {"value": value, "told": [value, *digits, TELL]}
        return Task(self.name, seed, level, ({"role": "user", "content": BEGIN},), data)

    def reset(self, task: Task) -> "MemoryEpisode":
        return MemoryEpisode(task)

    def oracle(self, task: Task) -> Sequence[Reply]:
        return [*[Reply(GO_ON)] * len(task.data["told"]), Reply(task.data["value"])]

    def random_reply(self, task: Task, random: Random, asked: str) -> Reply:
        is_on_the_way = asked == BEGIN or asked in task.data["told"][:-1]
        return Reply(GO_ON if is_on_the_way else random.choice(VALUES))


class MemoryEpisode(Episode):
    """One chain of steps."""

    def __init__(self, task: Task) -> None:
        self.messages, self._value = task.messages, task.data["value"]
        self._left = list(reversed(task.data["told"]))

    def step(self, reply: Reply) -> Turn:
        is_last, said = not self._left, "" if reply.is_truncated else reply.content
        is_legal = said in tuple(VALUES) if is_last else said == GO_ON
        if is_last or not is_legal:
            rewards = {"value": float(is_last and said == self._value)}
            return Turn(is_done=True, rewards=rewards, metrics={"illegal": float(not is_legal)})
        return Turn(({"role": "tool", "tool_call_id": "step", "content": self._left.pop()},))
