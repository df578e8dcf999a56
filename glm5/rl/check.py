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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import Queue
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
    benches: Queue[_Bench] = Queue()
    for _ in range(settings.workers):
        benches.put(_Bench(settings))
    environment = benches.queue[0].environment
    out = Path(settings.out or environment.folder or f"runs/check-{environment.name.replace('/', '-')}")
    with locked(out):
        journal = out / "checked.jsonl"
        known = {row["key"]: row for row in read_journal(journal, ConfigError, mends=True)}
        tasks: dict[str, Task] = {}
        for level in range(environment.levels):
            for seed in range(settings.tasks):
                task = environment.task(seed, level)
                tasks.setdefault(task.key, task)
        left = [task for key, task in tasks.items() if key not in known]
        with (
            Progress(len(left), "task", "check") as progress,
            ThreadPoolExecutor(settings.workers) as threads,
            journal.open("a", encoding="utf-8") as handle,
        ):
            waiting = [threads.submit(_checked, benches, task) for task in left]
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


class _Bench:
    """An environment for one task at a time, and the boxes that it has opened."""

    def __init__(self, settings: EnvCheckConfig) -> None:
        try:
            self._backend = choose_backend(unsafe_local=settings.unsafe_local)
        except ConfigError:  # only some environments need one
            self._backend = None
        self.opened: list[Sandbox] = []
        self.python = self._backend.python if self._backend else ""
        self.environment = make(settings.name, Boxes(self._open, self.python))

    def _open(self, **limits: int) -> Sandbox:
        if self._backend is None:
            raise EpisodeFailed("sandbox", "no sandbox works here; --unsafe-local does without")
        self.opened.append(Sandbox(self._backend, Limits(**limits)))
        return self.opened[-1]


def _checked(benches: "Queue[_Bench]", task: Task) -> dict[str, Any]:
    """A task's row: the gates that it failed, and why."""
    bench, failed = benches.get(), dict[str, str]()
    try:
        for gate, why in _failures(bench, task):
            failed[gate] = why[:300]
    except Exception as error:  # noqa: BLE001 - a fault of the environment is a result
        failed["oracle"] = reason_of(error)[:300]
    finally:
        bench.opened.clear()
        benches.put(bench)
    return {"key": task.key, "seed": task.seed, "level": task.level, "failed": failed}


def _failures(bench: _Bench, task: Task) -> Iterator[tuple[str, str]]:
    environment = bench.environment
    best = _reward(environment, task, environment.oracle(task))
    if best != 1:
        yield "oracle", f"it earned {best:g}"
    if (reward := _reward(environment, task, [Reply("")])) > 0:
        yield "no-op", f"it earned {reward:g}"
    bench.opened.clear()
    found: list[str] = []
    look = partial(_look, bench, list(environment.hidden(task)), found)
    if (reward := _reward(environment, task, environment.unsolved(task), look)) > 0:
        yield "unsolved", f"it earned {reward:g}"
    if found:
        yield "hidden", f"in the box: {found!r}"
    again = environment.task(task.seed, task.level)
    if again.key != task.key:
        yield "again", "another task"
    elif (reward := _reward(environment, again, environment.oracle(again))) != best:
        yield "again", f"it earned {reward:g} after {best:g}"


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


def _look(bench: _Bench, texts: Sequence[str], found: list[str]) -> None:
    """Add those hidden texts that are in the first box that the episode opened."""
    if texts and bench.opened:
        searched = bench.opened[0].run([bench.python, "-I", "-S", "-c", _SEARCH], 60, json.dumps(texts).encode())
        found += [texts[int(place)] for place in json.loads(searched.stdout)]


def _table(rows: Sequence[Any]) -> str:
    """A line for each level: tasks, those that passed, and how many failed at each gate."""
    lines: list[tuple[str, ...]] = [("level", "tasks", "passed", *GATES)]
    levels = sorted({row["level"] for row in rows})
    for level in levels:
        of = [row for row in rows if row["level"] == level]
        counts = Counter(gate for row in of for gate in row["failed"])
        passed = sum(not row["failed"] for row in of)
        lines.append((str(level), str(len(of)), str(passed), *(str(counts[gate]) for gate in GATES)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
