"""Terminal tasks: the policy runs commands in a box, and tests that come afterwards grade the files that it leaves.

    harbor/FOLDER      the Harbor tasks in a folder (harbor_task.py)

Grading: /tests is put into a fresh copy of the box where no process is left, of which only /app and /logs are kept and
from which reward files, compiled Python and links to the tests are removed; `separate` keeps declared artifacts alone.
/logs/verifier/reward.json (a finite number, or several by name) counts before reward.txt (one). Where the tests leave
none, or exceed a limit, they are tried on the start of the task: a reward there means that the policy broke them, which
earns 0; none there either is the environment's fault.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from glm5.common.errors import ConfigError
from glm5.rl.environments.boxes import NO_BOXES, Boxes
from glm5.rl.environments.harbor_task import HarborTask, read_task
from glm5.rl.environments.protocol import Environment, EpisodeFailed, Message, Reply, Task, Turn, left_out
from glm5.rl.environments.tool_use import LazyBox, ToolEpisode, call, function_tool
from glm5.rl.sandbox.sandbox import Sandbox

PREFIX = "harbor/"
NUM_TURNS, MAX_TASKS, MAX_STORAGE_MB = 30, 10_000, 2000
COMMAND_SECONDS, REPLY_SECONDS, TESTS_SECONDS = 20.0, 40.0, 30.0  # together less than workers wait for an answer
BASH = function_tool("bash", "Run a command; you get what it prints. Each begins in a new shell.", command="for bash")
SHORT = 20  # characters of a solution that may be in a box by chance
_CLEAN = Path(__file__).with_name("harbor_clean.sh")
_GRADING = {"HOME": "/tmp", "PYTHONNOUSERSITE": "1"}


class TerminalTasks(Environment):
    """Base of environments whose tasks are Harbor's."""

    num_turns: int = NUM_TURNS
    sandbox_levels: Sequence[int] = (0,)

    def __init__(self, boxes: Boxes = NO_BOXES) -> None:
        self._boxes = boxes

    def made(self, seed: int, level: int) -> HarborTask:
        """The task of that seed and level as Harbor has it."""
        raise NotImplementedError

    def task(self, seed: int, level: int) -> Task:
        made = self.made(seed, level)
        data = {"task": made.name, "digest": made.digest}
        return Task(self.name, seed, level, (_asked(made.steps[0].instruction),), data, (BASH,))

    def reset(self, task: Task) -> "TerminalEpisode":
        return TerminalEpisode(task, self.made(task.seed, task.level), self._boxes)

    def oracle(self, task: Task) -> Sequence[Reply]:
        made = self.made(task.seed, task.level)
        env = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in made.config.solution.env.items())
        solved = [Reply("", tool_calls=[call("bash", command=env + step.solution)]) for step in made.steps]
        return [reply for each in solved for reply in (each, Reply("done"))]

    def unsolved(self, task: Task) -> Sequence[Reply]:
        looked = Reply("", tool_calls=[call("bash", command="ls -la")])
        return [reply for _ in self.made(task.seed, task.level).steps for reply in (looked, Reply("done"))]

    def hidden(self, task: Task) -> Sequence[str]:
        steps = self.made(task.seed, task.level).steps
        return [step.solution.strip() for step in steps if len(step.solution.strip()) > SHORT]


class Harbor(TerminalTasks):
    """Seeds are the tasks of a folder by name, in turn. Raises ConfigError for tasks that cannot be run as they say."""

    def __init__(self, folder: str, boxes: Boxes = NO_BOXES) -> None:
        super().__init__(boxes)
        self.name, self.folder = PREFIX + folder, folder
        paths = sorted(path.parent for path in Path(folder).glob("*/task.toml"))[:MAX_TASKS]
        if not paths:
            raise ConfigError(f"{self.name}: no folder in {Path(folder).absolute()} has a task.toml")
        self._tasks = [read_task(path) for path in paths]
        if bad := left_out(folder):
            keys = {place: self.task(place, 0).key for place in range(len(paths))}
            self._tasks = [task for place, task in enumerate(self._tasks) if keys[place] not in bad]
            if not self._tasks:
                raise ConfigError(f"{self.name}: no task has passed glm5 env check")

    def made(self, seed: int, level: int) -> HarborTask:
        return self._tasks[seed % len(self._tasks)]


def _asked(instruction: str) -> Message:
    return {"role": "user", "content": instruction}


class TerminalEpisode:
    """A step of the task ends with a reply without a call, and is graded; the next one's instruction follows."""

    def __init__(self, task: Task, made: HarborTask, boxes: Boxes) -> None:
        self.messages: Sequence[Message] = task.messages
        self._task, self._made = task, made
        room = made.config.environment
        sized = partial(boxes.open, memory_mb=room.memory_mb, disk_mb=min(room.storage_mb, MAX_STORAGE_MB))
        self._boxes = Boxes(sized, boxes.python)
        self._box, self._turns_left = self._start(), NUM_TURNS
        self._ends, self._tools = list[Turn](), self._begun(0)

    def step(self, reply: Reply) -> Turn:
        self._turns_left -= 1
        self._until = monotonic() + REPLY_SECONDS
        turn = self._tools.step(reply)
        if not turn.is_done:
            return turn
        self._ends.append(turn)
        steps, number = self._made.steps, len(self._ends)
        if number < len(steps) and self._turns_left > 0:
            self._tools = self._begun(number)
            return Turn((_asked(steps[number].instruction),))
        rewards = [end.rewards["reward"] for end in self._ends] + [0.0] * (len(steps) - number)
        is_final = self._made.config.multi_step_reward_strategy == "final"
        reward = rewards[-1] if is_final else sum(rewards) / len(rewards)
        return Turn(is_done=True, rewards={"reward": reward}, metrics={**turn.metrics, "steps": float(number)})

    def _begun(self, number: int) -> ToolEpisode:
        step = self._made.steps[number]
        self._seconds_left = step.agent.timeout_sec
        if step.workdir:
            box = self._box.open()
            try:
                for path, data in step.workdir.items():
                    box.write(f"{self._made.workdir[1:]}/{path}", data)
                box.run(self._argv("[ ! -e setup.sh ] || bash setup.sh"), timeout=REPLY_SECONDS)
            except OSError:
                pass  # the policy left something in the way
        return ToolEpisode(self._task, {"bash": self._run}, lambda _: self._score(number), self._turns_left, self._box)

    def _argv(self, command: str, env: Mapping[str, str] = {}) -> list[str]:
        variables = {**self._made.env, "PYTHONDONTWRITEBYTECODE": "1", **env}
        words = [f"{name}={value}" for name, value in variables.items()]
        return ["/usr/bin/env", f"--chdir={self._made.workdir}", *words, "/bin/bash", "-c", command]

    def _run(self, given: Mapping[str, Any]) -> str:
        self._box.open()
        begun = monotonic()
        seconds = min(COMMAND_SECONDS, self._seconds_left, self._until - begun)
        if seconds <= 0:
            raise ValueError("the time for commands is used up")
        told = self._box.run_shell(self._argv(given["command"]), seconds)
        self._seconds_left -= monotonic() - begun
        return told

    def _start(self) -> LazyBox:
        return LazyBox(self._boxes, self._made.files, self._prepare)

    def _prepare(self, box: Sandbox) -> None:
        made, room = self._made, self._made.config.environment
        lines = [f"(cd {shlex.quote(folder)}\n{line}\n)" for folder, line in made.setup]
        scripts = [shlex.quote(f"/{path}") for path, data in made.files.items() if data.startswith(b"#!")]
        lines = [f"chmod +x {' '.join(scripts)}", *lines] if scripts else lines
        checks = [f"cd {shlex.quote(made.workdir)}\n{room.healthcheck.command}"] if room.healthcheck else []
        begin = f"mkdir -p app logs/agent logs/verifier logs/artifacts\nmkdir -p {shlex.quote(made.workdir)}"
        words = [f"{name}={value}" for name, value in made.env.items()]
        script = "\n".join([begin, *lines, *checks])
        done = box.run(["/usr/bin/env", *words, "/bin/bash", "-ec", script], min(room.build_timeout_sec, REPLY_SECONDS))
        if done.exit_code:
            said = done.stderr[-500:].decode(errors="replace")
            raise EpisodeFailed("environment", f"{made.name}: a box could not be prepared ({done.ended_by}): {said}")

    def _score(self, number: int) -> Turn:
        found = self._graded(number, self._box.open())
        if isinstance(found, str):
            with closing(self._start()) as start:
                again = self._graded(number, start.open())
            if isinstance(again, str):
                raise EpisodeFailed("environment", f"{self._made.name}: no reward, and none at the start: {again}")
            found = {"reward": 0.0, "broken": 1.0}
        return Turn(is_done=True, rewards={"reward": found["reward"]}, metrics=found)

    def _graded(self, number: int, box: Sandbox) -> dict[str, float] | str:
        """What the tests say of a copy of a box; or why they say nothing."""
        step, made = self._made.steps[number], self._made
        try:
            with closing(box.fresh_copy()) as copy:
                clean = _CLEAN.read_text(encoding="utf-8")
                if step.verifier.environment_mode == "separate":
                    for each in step.verifier.collect:
                        copy.run(self._argv(each.command), min(each.timeout_sec, COMMAND_SECONDS))
                    clean = f"{_keeping(made)}\n{clean}"
                done = copy.run(["/bin/bash", "-ec", clean], timeout=TESTS_SECONDS)
                if done.exit_code:
                    return f"what grading must not see is still there ({done.ended_by})"
                for path, data in step.tests.items():
                    copy.write(f"tests/{path}", data)
                run = f"mkdir -p {shlex.quote(made.workdir)}; bash /tests/test.sh >/logs/verifier/test-stdout.txt 2>&1"
                tests = self._argv(run, {**_GRADING, **step.verifier.env})
                done = copy.run(tests, timeout=min(step.verifier.timeout_sec, TESTS_SECONDS))
                return _reward(copy) if done.ended_by == "exit" else f"the tests were ended by {done.ended_by}"
        except OSError as error:
            return str(error)

    def close(self) -> None:
        self._box.close()


def _keeping(made: HarborTask) -> str:
    """Shell that keeps the artifacts alone."""
    lines = ["mkdir .kept"]
    for each in made.config.artifacts:
        path = shlex.quote(each.source[1:])
        lines.append(f"if [ -e {path} ]; then mkdir -p .kept/{path}; rmdir .kept/{path}; mv {path} .kept/{path}; fi")
        lines += [f"find .kept -name {shlex.quote(name)} -prune -exec rm -rf {{}} +" for name in each.exclude]
    return "\n".join([*lines, "chmod -R u+rwX app logs; rm -rf app logs; mkdir app", "cp -a .kept/. . "])


def _reward(box: Sandbox) -> dict[str, float] | str:
    """Numbers by name, "reward" among them: where the tests give several without that name, their mean."""
    try:
        try:
            found: Any = json.loads(box.read("logs/verifier/reward.json"))
        except FileNotFoundError:
            found = float(box.read("logs/verifier/reward.txt"))
        numbers: dict[str, float] = found if isinstance(found, dict) else {"reward": found}
        if not numbers or not all(map(math.isfinite, numbers.values())):
            return f"rewards must be finite numbers, got {numbers!r:.80}"
        return {"reward": sum(numbers.values()) / len(numbers), **numbers}
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        return f"rewards must be finite numbers: {error}"
