"""`glm5 env check`: what has not passed does not train. Five gates for each task:

    oracle     the environment's own solution earns the most (1)
    no-op      an empty reply earns 0
    unsolved   replies that do something, but solve nothing, earn 0
    hidden     at their start the box holds no text of the tests or the solution
    again      the same seed gives the same task, and the oracle's replies the same reward

OUT/checked.jsonl has a line for each task, added as they end: the same command goes on from there. Keys of tasks that
did not pass are written to left-out.txt beside the environment's tasks.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from glm5.common.atomic import atomic_write
from glm5.common.errors import ConfigError, reason_of
from glm5.common.journal import read_journal
from glm5.common.progress import Progress
from glm5.config.env import EnvCheckConfig
from glm5.rl.environments.boxes import Boxes
from glm5.rl.environments.protocol import LEFT_OUT, Environment, EpisodeFailed, Reply, Task, left_out
from glm5.rl.environments.table import make
from glm5.rl.sandbox.choice import choose_backend
from glm5.rl.sandbox.sandbox import Limits, Sandbox
from glm5.train.state import locked

GATES = ("oracle", "no-op", "unsolved", "again", "hidden")
# Which of the texts on standard input some file of a box contains.
_SEARCH = """\
import json, os, sys
texts, found = [text.encode() for text in json.load(sys.stdin)], set()
for top in (".", "/tmp"):
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                content = open(path, "rb").read()
                found |= {place for place, text in enumerate(texts) if text in content}
print(json.dumps(sorted(found)))
"""


def check(settings: EnvCheckConfig) -> tuple[str, bool]:
    """Check tasks that have not been; returns a table and whether all have passed. Raises ConfigError."""
    checker = _Checker(settings)
    environment = checker.environment
    out = Path(settings.out or environment.folder or f"runs/check-{environment.name.replace('/', '-')}")
    with locked(out):
        journal = out / "checked.jsonl"
        known = {row["key"]: row for row in read_journal(journal, ConfigError, mends=True)}
        every = (environment.task(seed, level) for level in range(environment.levels) for seed in range(settings.tasks))
        left = list({task.key: task for task in every if task.key not in known}.values())
        with (
            Progress(len(left), "task", "check") as progress,
            ThreadPoolExecutor(settings.workers) as threads,
            journal.open("a", encoding="utf-8") as handle,
        ):
            waiting = [threads.submit(checker.row, task) for task in left]
            try:
                for one in as_completed(waiting):
                    row = one.result()
                    known[row["key"]] = row
                    handle.write(json.dumps(row) + "\n")
                    handle.flush()
                    progress.update(1)
            finally:
                threads.shutdown(cancel_futures=True)
        bad = {key for key, row in known.items() if row["failed"]}
        with atomic_write(out / LEFT_OUT) as handle:
            handle.writelines(f"{key}\n" for key in sorted(bad | left_out(out)))
    return _table(list(known.values())), not bad


class _Checker:
    """An environment, and what each thread has opened for the task that it plays."""

    def __init__(self, settings: EnvCheckConfig) -> None:
        try:
            self._backend = choose_backend(unsafe_local=settings.unsafe_local)
        except ConfigError:  # only some environments need one
            self._backend = None
        self._of_thread = threading.local()
        self._python = self._backend.python if self._backend else ""
        self.environment = make(settings.name, Boxes(self._open, self._python))

    def _open(self, **limits: int) -> Sandbox:
        if self._backend is None:
            raise EpisodeFailed("sandbox", "no sandbox works here; --unsafe-local does without")
        box = Sandbox(self._backend, Limits(**limits))
        self._of_thread.boxes.append(box)
        return box

    def row(self, task: Task) -> dict[str, Any]:
        """The gates that a task failed, and why."""
        self._of_thread.boxes, failed = [], dict[str, str]()
        try:
            for gate, why in self._failures(task):
                failed[gate] = why[:300]
        except Exception as error:  # noqa: BLE001 - a fault of the environment is a result
            failed["oracle"] = reason_of(error)[:300]
        return {"key": task.key, "seed": task.seed, "level": task.level, "failed": failed}

    def _failures(self, task: Task) -> Iterator[tuple[str, str]]:
        environment, hidden = self.environment, list(self.environment.hidden(task))
        best = _reward(environment, task, environment.oracle(task))
        if best != 1:
            yield "oracle", f"it earned {best:g}"
        if (reward := _reward(environment, task, [Reply("")])) > 0:
            yield "no-op", f"it earned {reward:g}"
        found: list[str] = []
        self._of_thread.boxes.clear()
        look = partial(self._look, hidden, found)
        if (reward := _reward(environment, task, environment.unsolved(task), look)) > 0:
            yield "unsolved", f"it earned {reward:g}"
        if found:
            yield "hidden", f"in the box: {found!r}"
        again = environment.task(task.seed, task.level)
        if again.key != task.key:
            yield "again", "another task"
        elif (reward := _reward(environment, again, environment.oracle(again))) != best:
            yield "again", f"it earned {reward:g} after {best:g}"

    def _look(self, texts: Sequence[str], found: list[str]) -> None:
        """Add those texts that are in the first box that the episode opened."""
        if texts and self._of_thread.boxes:
            argv, stdin = [self._python, "-I", "-S", "-c", _SEARCH], json.dumps(texts).encode()
            found += [texts[int(place)] for place in json.loads(self._of_thread.boxes[0].run(argv, 60, stdin).stdout)]


def _reward(
    environment: Environment, task: Task, replies: Sequence[Reply], after_first: Callable[[], None] = lambda: None
) -> float:
    """Of these replies; those after them are empty."""
    with closing(environment.reset(task)) as episode:
        for turn in range(max(environment.num_turns, len(replies))):
            answer = episode.step(replies[turn] if turn < len(replies) else Reply(""))
            if turn == 0:
                after_first()
            if answer.is_done:
                return sum(answer.rewards.values())
        return 0.0


def _table(rows: Sequence[Any]) -> str:
    """A line for each level: tasks, those that passed, and how many failed at each gate."""
    lines: list[tuple[str, ...]] = [("level", "tasks", "passed", *(f"{gate} failed" for gate in GATES))]
    levels = sorted({row["level"] for row in rows})
    for level in levels:
        of = [row for row in rows if row["level"] == level]
        counts = Counter(gate for row in of for gate in row["failed"])
        passed = sum(not row["failed"] for row in of)
        lines.append((str(level), str(len(of)), str(passed), *(str(counts[gate]) for gate in GATES)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
