"""Tasks of one source, in a folder of their own: what has been tried stands in tasks.jsonl, and is not tried again.

A task starts from the source with `edits` undone: [path, start in bytes, text that is right, text at the start of the
task]. The last is None where the solution adds the file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from glm5.common.errors import ConfigError, reason_of
from glm5.common.journal import read_journal
from glm5.common.progress import Progress
from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.sandbox import Limits, Sandbox, SandboxFailed
from glm5.rl.swe.outcomes import QUIET, RUNTIME, Outcome, run_tests, with_canaries
from glm5.rl.swe.package import packages, program

LIMITS = Limits(memory_mb=2000, disk_mb=256, output_bytes=64_000_000)
# Which of its arguments the interpreter has, by itself or within pip.
THERE = """
import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) or find_spec("pip") and find_spec("pip._vendor." + name)])
"""
Edit = tuple[str, int, str, str | None]


class Test(NamedTuple):
    """A test that passes. `called`: functions of the program, by path and first line; `is_canary`: whether it fails
    where what it claims is wrong."""

    seconds: float
    called: list[tuple[str, int]]
    is_canary: bool


def started(files: Mapping[str, bytes], edits: Sequence[Edit]) -> dict[str, bytes]:
    """The files as they are when a task begins."""
    changed = dict(files)
    for path, start, right, wrong in edits:
        if wrong is None:
            del changed[path]
        else:
            content = files[path]
            changed[path] = content[:start] + wrong.encode() + content[start + len(right.encode()) :]
    return changed


def edit(path: str, right: str, wrong: str | None) -> Edit:
    """From the texts of a whole file, without what they have in common at both ends."""
    if wrong is None:
        return path, 0, right, None
    start = _num_equal(right, wrong)
    same = _num_equal(right[start:][::-1], wrong[start:][::-1])
    return path, len(right[:start].encode()), right[start : len(right) - same], wrong[start : len(wrong) - same]


def _num_equal(left: str, right: str) -> int:
    """Characters at their beginnings."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))


class Maker:
    """`known`: what the folder's tasks.jsonl has, by key; tasks have a "kind"."""

    def __init__(self, folder: Path, source: Path, wanted: int, backend: Backend, progress: Progress) -> None:
        self.folder, self.source, self._wanted, self._backend = folder, source, wanted, backend
        self._progress, self._box, self._is_stopped = progress, None, False
        self.known: dict[str, dict[str, Any]] = {}

    def tried(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Keys that are not known yet, with the task, or {} where there is none."""
        raise NotImplementedError

    def run(self) -> str:
        """Make what is missing. Whatever is wrong with a source is told, and others go on."""
        try:
            return self._make()
        except (ConfigError, OSError, SandboxFailed) as error:
            return f"skipped: {error}"
        except Exception as error:  # noqa: BLE001 - what a package's programs cause in ours
            return f"skipped: {reason_of(error)}"

    def _make(self) -> str:
        journal = self.folder / "tasks.jsonl"
        self.known = {task["key"]: task for task in read_journal(journal, ConfigError, mends=True)}
        num_tasks = sum("kind" in task for task in self.known.values())
        for key, task in self.tried() if num_tasks < self._wanted else ():
            self.known[key] = {"key": key, **task}
            with journal.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(self.known[key]) + "\n")
            self._progress.update(int(bool(task)))
            num_tasks += bool(task)
            if num_tasks >= self._wanted:
                break
        return f"{num_tasks} tasks, {len(self.known)} tried"

    def refuse_known(self, files: Mapping[str, bytes]) -> None:
        """Raise ConfigError for a package that boxes have without the task, or that tests are run with."""
        names = {Path(top).stem for top in packages(files)}
        if clash := names & set(RUNTIME):
            raise ConfigError(f"tests are run with {', '.join(clash)}, which it replaces")
        with Sandbox(self._backend) as box:
            there = box.run([self._backend.python, "-c", THERE, *names]).stdout.decode().strip()
        if there:
            raise ConfigError(f"the boxes have {there} already, with the solutions")

    def measured(self, files: Mapping[str, bytes], collected: Sequence[str], seconds: float) -> dict[str, Test]:
        """Tests that pass twice, and call the program."""
        both = self.ran(files, collected, [{"is_traced": True}, {}], seconds=seconds)
        traced, again = both if len(both) == 2 else ({}, {})
        (wrong,) = self.ran(with_canaries(files), collected, seconds=seconds, options=QUIET) or [{}]
        own, found = program(files), dict[str, Test]()
        for name, one in again.items():
            if one.outcome == "passed" and (first := traced.get(name)) and first.outcome == "passed" and first.called:
                called = [(path, line) for path, line in first.called if path in own]
                found[name] = Test(one.seconds, called, name in wrong and wrong[name].outcome == "failed")
        return found

    def ran(
        self, files: Mapping[str, bytes], collected: Sequence[str], *args: Any, **more: Any
    ) -> list[dict[str, Outcome]]:
        """`run_tests` in a new box."""
        with Sandbox(self._backend, LIMITS) as self._box:
            python = self._backend.python
            outcomes = [] if self._is_stopped else run_tests(self._box, python, files, collected, *args, **more)
        if self._is_stopped:  # a part of a measurement must not be taken for all of it
            raise ConfigError("it was stopped")
        return outcomes

    def stop(self) -> None:
        """Let another thread's `run` end soon."""
        self._is_stopped = True
        if self._box is not None:
            self._box.close()


def task_of(
    tests: Mapping[str, Test],
    failed: Sequence[Outcome],
    passed: Sequence[str],
    edits: Sequence[Edit],
    **more: Any,
) -> dict[str, Any]:
    """The task in which these tests fail and pass at the start; {} where no claim of the first counts, or none
    passes."""
    canaries = [one.test for one in failed if tests[one.test].is_canary]
    if not canaries or not passed:
        return {}
    return {
        **more,
        "edits": edits,
        "fail_to_pass": [one.test for one in failed],
        "pass_to_pass": passed,
        "canaries": canaries,
        "failures": [[one.test, one.told] for one in failed[:3]],
    }
