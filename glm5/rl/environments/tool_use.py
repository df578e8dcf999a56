"""Episodes with tools: calls are answered until a reply without one, which is the answer.

Whatever a call does wrong (an unknown tool, arguments that are no JSON, an error of the tool) is told to the policy.
Calls, their arguments and their results are bounded.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from glm5.rl.environments.boxes import Boxes
from glm5.rl.environments.protocol import Message, Reply, Task, Turn
from glm5.rl.sandbox.sandbox import Completed, Sandbox

Tool = Callable[[Mapping[str, str]], str]
"""From arguments to a result. ValueError or KeyError say what is wrong with the arguments."""

MAX_CALLS = 8
"""Calls of one reply."""
MAX_ARGUMENTS, MAX_RESULT = 20_000, 4_000
"""In characters."""


class ToolEpisode:
    """`num_turns`: after so many replies without an answer it ends with reward 0."""

    def __init__(
        self, task: Task, tools: Mapping[str, Tool], score: Callable[[Reply], Turn], num_turns: int, box: "LazyBox"
    ) -> None:
        self.messages: Sequence[Message] = task.messages
        self._tools, self._score, self._left, self._box = tools, score, num_turns, box
        self._num_calls, self._num_errors = 0, 0

    def step(self, reply: Reply) -> Turn:
        self._left -= 1
        if reply.tool_calls and self._left > 0:
            return Turn(tuple(self._answered(call) for call in reply.tool_calls[:MAX_CALLS]))
        end = self._score(Reply("") if reply.tool_calls or reply.is_truncated else reply)
        counted = {"tool_calls": float(self._num_calls), "tool_errors": float(self._num_errors)}
        return Turn(is_done=True, rewards=end.rewards, metrics={**end.metrics, **counted})

    def _answered(self, call: Mapping[str, Any]) -> Message:
        self._num_calls += 1
        try:
            result = self._result(call["function"]["name"], call["function"]["arguments"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._num_errors += 1
            result = f"error: {f'{error} is missing' if isinstance(error, KeyError) else error}"
        return {"role": "tool", "tool_call_id": str(call.get("id", "")), "content": result[:MAX_RESULT]}

    def _result(self, name: str, arguments: str | Mapping[str, Any]) -> str:
        if name not in self._tools:
            raise ValueError(f"no tool is called {name!r:.80}; there are {', '.join(self._tools)}")
        if isinstance(arguments, str):
            if len(arguments) > MAX_ARGUMENTS:
                raise ValueError(f"arguments of {len(arguments)} characters; allowed are {MAX_ARGUMENTS}")
            arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            raise ValueError("arguments must be a JSON object")
        for key, value in arguments.items():
            if not isinstance(value, str):
                raise ValueError(f"{key!r:.80} must be text, not {type(value).__name__}")
        return self._tools[name](arguments)

    def close(self) -> None:
        self._box.close()


class LazyBox:
    """A sandbox that is opened when it is first needed, with `files` in it; `prepare` does the rest."""

    def __init__(
        self,
        boxes: Boxes,
        files: Mapping[str, bytes] = MappingProxyType({}),
        prepare: Callable[[Sandbox], None] = lambda _: None,
    ) -> None:
        self._boxes, self._files, self._prepare = boxes, files, prepare
        self._box: Sandbox | None = None

    def open(self) -> Sandbox:
        """The box, for those who grade what is in it. Raises EpisodeFailed, SandboxFailed."""
        if self._box is None:
            self._box = self._boxes.open()
            for path, data in self._files.items():
                self._box.write(path, data)
            self._prepare(self._box)
        return self._box

    def run_python(self, code: str, seconds: float) -> str:
        """What a program prints, its errors included, and what ended it."""
        box = self.open()
        try:
            box.write("code.py", code.encode(errors="replace"))
            return _told(box.run([self._boxes.python, "-B", "code.py"], timeout=seconds))
        except OSError as error:
            raise ValueError(str(error)) from None

    def run_shell(self, command: str | Sequence[str], seconds: float) -> str:
        """The same of a line of shell, or of a program as words."""
        return _told(self.open().run(command, timeout=seconds))

    def close(self) -> None:
        with suppress(OSError):
            if self._box is not None:
                self._box.close()


def _told(done: Completed) -> str:
    told = (done.stdout + done.stderr[-MAX_RESULT // 2 :]).decode(errors="replace")
    return told if done.ended_by == "exit" else f"{told[-MAX_RESULT // 2 :]}\nended by: {done.ended_by}"


def function_tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    """A tool as chat templates take it, whose arguments are strings with these descriptions."""
    properties = {key: {"type": "string", "description": told} for key, told in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call(name: str, **arguments: str) -> dict[str, Any]:
    """A reply's tool call."""
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
