"""Functions to write, in three levels: expressions; loops over lists and strings; algorithms.

The reply is Python, in a fenced block or alone. Its function f runs on hidden inputs in a sandbox, and what it returned
is compared out here with the right results, which never enter the box. Whatever the program does (errors, time, memory,
output without end) earns 0. The reward is 1 if all inputs give the right result.
"""

import json
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import lru_cache
from random import Random
from threading import Lock
from typing import Any

from glm5.rl.environments.boxes import NO_BOXES, Boxes
from glm5.rl.environments.programs import Program, program_levels
from glm5.rl.environments.protocol import Environment, Reply, Task, Turn
from glm5.rl.environments.single_turn import SingleTurn
from glm5.rl.sandbox.sandbox import Completed

MAX_CHARS = 20_000
"""The longest program that is run."""
SECONDS = 5.0
MAX_RUNS = 2048
"""Programs whose results are remembered: replies of a group are often the same."""
_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
_RUNNER = b"""\
import json, os, sys
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
returned = []
try:
    from solution import f
    for arguments in json.loads(sys.stdin.read()):
        try:
            returned.append([f(*arguments)])
        except Exception:
            returned.append([])
finally:
    results.write("\\n" + json.dumps(returned))
    results.flush()
    os._exit(0)
"""


class Coding(Environment):
    """`boxes`: where programs run."""

    name, levels, sandbox_levels, begins_quickly = "code", 3, range(3), True

    def __init__(self, boxes: Boxes = NO_BOXES) -> None:
        self._boxes = boxes
        self._runs: dict[tuple[str, str], tuple[Lock, list[Any]]] = {}  # of whoever runs it; [what it returned]
        self._lock = Lock()

    def task(self, seed: int, level: int) -> Task:
        program: Program = program_levels()[level].made(seed)
        random = Random(f"code {level} {seed}")
        inputs = [program.arguments(random) for _ in range(program.num_inputs)]
        example = f"f({', '.join(map(repr, inputs[0]))}) is {results_of(program.source, inputs[:1])[0]!r}"
        asked = {"role": "user", "content": f"Write a Python function {program.text} For example, {example}."}
        return Task(self.name, seed, level, (asked,), {"source": program.source, "inputs": inputs})

    def reset(self, task: Task) -> SingleTurn:
        return SingleTurn(task, lambda reply: self._scored(reply, task))

    def oracle(self, task: Task) -> Sequence[Reply]:
        return [Reply(f"```python\n{task.data['source']}```")]

    def _scored(self, reply: Reply, task: Task) -> Turn:
        wanted = results_of(task.data["source"], task.data["inputs"])
        returned = self._returned(program_of(reply.content), task.data["inputs"])
        # As JSON, since True is not 1.
        pairs = zip(map(json.dumps, returned), (json.dumps([right]) for right in wanted), strict=False)
        passed = sum(got == right for got, right in pairs) / len(wanted)
        return Turn(is_done=True, rewards={"right": float(passed == 1)}, metrics={"passed": passed})

    def _returned(self, program: str, inputs: Sequence[Any]) -> list[Any]:
        """What f returned, each as [value]; [] where it raised, and for a program that did not end well. A program runs
        once on the same inputs, unless it did not end by itself: that may be an overloaded machine's fault."""
        if not program or len(program) > MAX_CHARS:
            return []
        key = program, json.dumps(inputs)
        with self._lock:
            if len(self._runs) >= MAX_RUNS:
                self._runs.clear()
            lock, known = self._runs.setdefault(key, (Lock(), []))
        with lock:
            if known:
                return known[0]
            done = self._run(*key)
            returned = [] if done is None else _read(done.stdout)
            if done is not None and done.ended_by == "exit":
                known.append(returned)
            return returned

    def _run(self, program: str, inputs: str) -> Completed | None:
        """How it ended; None where it broke its box."""
        box = self._boxes.open()
        with suppress(OSError), closing(box):
            box.write("solution.py", program.encode(errors="replace"))
            box.write("run.py", _RUNNER)
            return box.run([self._boxes.python, "-B", "run.py"], timeout=SECONDS, stdin=inputs.encode())


def _read(printed: bytes) -> list[Any]:
    try:
        returned = json.loads(printed.rpartition(b"\n")[2])
    except (ValueError, RecursionError):
        return []
    return returned if isinstance(returned, list) else []


def program_of(content: str) -> str:
    """The program in a reply: its last fenced block, else all of it."""
    blocks = _BLOCK.findall(content)
    return blocks[-1] if blocks else content


@lru_cache(maxsize=256)
def _function_of(source: str) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)
    return names["f"]


def results_of(source: str, inputs: Sequence[Any]) -> list[Any]:
    """What a right solution returns for each input. `source` is one of programs.toml, never a reply."""
    function = _function_of(source)
    return [function(*arguments) for arguments in inputs]
