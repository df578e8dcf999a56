"""An environment whose tool answers whatever is said, a few times; the reward counts the letters that were said."""

from glm5.rl.environments.protocol import Environment, Reply, Task, Turn
from glm5.rl.environments.tool_use import function_tool

TURNS = 6


class Chatty(Environment):
    name, num_turns, is_quick = "chatty", TURNS + 1, True

    def task(self, seed: int, level: int) -> Task:
        asked = {"role": "user", "content": f"Guess {seed}"}
        return Task(self.name, seed, level, (asked,), {}, (function_tool("look", "", at="a"),))

    def reset(self, task: Task) -> "_Episode":
        return _Episode(task)

    def oracle(self, task: Task) -> list[Reply]:
        return [Reply("Yes")] * (TURNS + 1)


class _Episode:
    def __init__(self, task: Task) -> None:
        self.messages, self._turns, self._letters = task.messages, 0, 0

    def step(self, reply: Reply) -> Turn:
        self._turns, self._letters = self._turns + 1, self._letters + len(reply.content)
        if self._turns > TURNS:
            return Turn(is_done=True, rewards={"letters": self._letters / 10})
        return Turn(({"role": "tool", "tool_call_id": "c", "content": f"lower {self._turns}"},))

    def close(self) -> None:
        pass
