"""`glm5 env make swe`: tasks from packages with tests. Each is a fault that some test notices and some other does not.

    OUT/PACKAGE/source/       the package, as it was
    OUT/PACKAGE/tests.json    its tests that pass, with the functions that they call
    OUT/PACKAGE/tasks.jsonl   tasks, and keys of faults that made none, a line each; the same command goes on from there

Tests and faults run in a box. Of a fault, those tests run that call the changed function, the most particular first.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from glm5.common.atomic import atomic_dir, atomic_write_json
from glm5.common.bounded import TABLES, read_bounded
from glm5.common.errors import ConfigError, reason_of
from glm5.common.journal import read_journal
from glm5.common.progress import Progress
from glm5.config.env import EnvMakeConfig
from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.choice import choose_backend
from glm5.rl.sandbox.sandbox import Limits, Sandbox, SandboxFailed
from glm5.rl.swe.mutations import REMOVED_FUNCTION, Mutation, mutations
from glm5.rl.swe.package import RUNTIME, asked, fill, packages, program, read_source, request, runtime, with_canaries
from glm5.rl.swe.package import test_files as tests_in
from glm5.train.state import locked

LIMITS = Limits(memory_mb=2000, disk_mb=256, output_bytes=64_000_000)
MEASURE_SECONDS, FAULT_SECONDS, BATCH_SECONDS = 240.0, 4.0, 200.0
BATCH, MAX_TESTS, MAX_TEST_TIME, MIN_PASSED, MAX_ORIGINAL = 100, 24, 1.0, 6, 8_000
# Which of its arguments the interpreter has, by itself or within pip.
THERE = """
import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) or find_spec("pip") and find_spec("pip._vendor." + name)])
"""
Tests = dict[str, tuple[float, list[tuple[str, int]], bool]]
"""By name: seconds, functions called (path, first line), and whether it fails where its claims are wrong."""


def make_tasks(settings: EnvMakeConfig) -> str:
    """Make tasks of each source; returns a table by package. Raises ConfigError where none can be made."""
    out, backend = Path(settings.out), choose_backend(unsafe_local=settings.unsafe_local)
    sources = {Path(each).name.removesuffix(".tar.gz"): Path(each) for each in settings.source}
    with locked(out), Progress(None, "task", "make") as progress, ThreadPoolExecutor(settings.workers) as threads:
        makers = [_Maker(out / name, path, settings.tasks, backend, progress) for name, path in sources.items()]
        try:
            told = list(threads.map(_Maker.run, makers))
        finally:
            for maker in makers:
                maker.stop()
    kinds = Counter(task["kind"] for maker in makers for task in maker.known.values() if "kind" in task)
    lines = [f"{maker.folder.name}: {line}" for maker, line in zip(makers, told, strict=True)]
    if not kinds:
        raise ConfigError(f"no task was made: {'; '.join(lines)}")
    lines.append(", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    return "\n".join([*lines, f"{kinds.total()} tasks of {len(kinds)} kinds: {out}"])


class _Maker:
    """Tasks of one package. `known`: what its file has, by key."""

    def __init__(self, folder: Path, source: Path, wanted: int, backend: Backend, progress: Progress) -> None:
        self.folder, self._source, self._wanted, self._backend = folder, source, wanted, backend
        self._progress, self._box, self._is_stopped = progress, None, False
        self.known: dict[str, dict[str, Any]] = {}

    def run(self) -> str:
        """Make what is missing. Whatever is wrong with a package is told, and others go on."""
        try:
            if not self.folder.exists():
                self._measure()
            return self._make()
        except (ConfigError, OSError, SandboxFailed) as error:
            return f"skipped: {error}"
        except Exception as error:  # noqa: BLE001 - what a package's programs cause in ours
            return f"skipped: {reason_of(error)}"

    def _measure(self) -> None:
        """Copy the package and run its tests. ConfigError where they cannot be used."""
        files = read_source(self._source)
        names = {Path(top).stem for top in packages(files)}
        if clash := names & set(RUNTIME):
            raise ConfigError(f"tests are run with {', '.join(clash)}, which it replaces")
        with Sandbox(self._backend) as box:
            there = box.run([self._backend.python, "-c", THERE, *names]).stdout.decode().strip()
        if there:
            raise ConfigError(f"the boxes have {there} already, with the solutions")
        tests = {name: (seconds, called, False) for name, seconds, called in self._passing(files)}
        if len(tests) < 2:
            raise ConfigError("no two of its tests pass here: what they import may be missing")
        wrong = with_canaries(files, tests_in(files))
        about = request(files, "measure", tests_in(files), seconds=MEASURE_SECONDS, traced=[False])
        for line in self._ask(wrong, about, 2 * MEASURE_SECONDS):
            if isinstance(line, list) and line[1] == "failed" and line[0] in tests:
                tests[line[0]] = (*tests[line[0]][:2], True)
        with atomic_dir(self.folder) as folder:
            for path, content in files.items():
                (folder / "source" / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "source" / path).write_bytes(content)
            atomic_write_json(folder / "tests.json", tests)

    def _passing(self, files: dict[str, bytes]) -> Iterator[tuple[str, float, list[tuple[str, int]]]]:
        """Tests that pass twice, with what they call."""
        about = request(files, "measure", tests_in(files), seconds=MEASURE_SECONDS, traced=[True, False])
        called: dict[str, list[tuple[str, int]]] = {}
        own = program(files)
        for line in self._ask(files, about, 2 * MEASURE_SECONDS):
            if not isinstance(line, list) or line[1] != "passed":
                continue
            if line[0] in called:
                yield line[0], line[2], called[line[0]]
            elif line[4]:
                called[line[0]] = [(path, number) for path, number in line[4] if path in own]

    def _make(self) -> str:
        content = read_source(self.folder / "source")
        tests: Tests = json.loads(read_bounded(self.folder / "tests.json", TABLES, ConfigError))
        journal = self.folder / "tasks.jsonl"
        self.known = {task["key"]: task for task in read_journal(journal, ConfigError, mends=True)}
        covering: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name, (_, called, _) in tests.items():
            for path, line in called:
                covering[path, line].append(name)
        candidates = _candidates(program(content), covering, self.known)
        while self._num_tasks() < self._wanted and (batch := list(islice(candidates, BATCH))):
            chosen = {key: _chosen(tests, covering[path, one.covered_line]) for key, path, one in batch}
            outcomes = self._tried(content, batch, chosen)
            if not outcomes:
                break
            with journal.open("a", encoding="utf-8") as handle:
                for key, path, one in batch:
                    if key not in outcomes and chosen[key]:
                        continue  # the time of the batch was over; the next run tries it
                    task = _task(path, one, content[path], outcomes.get(key, []), tests)
                    self.known[key] = {"key": key, **task}
                    handle.write(json.dumps(self.known[key]) + "\n")
                    self._progress.update(int(bool(task)))
        return f"{self._num_tasks()} tasks of {len(self.known)} faults, {len(tests)} tests"

    def _num_tasks(self) -> int:
        return sum("kind" in task for task in self.known.values())

    def _tried(
        self, files: dict[str, bytes], batch: Sequence["Candidate"], chosen: dict[str, list[str]]
    ) -> dict[str, list[Any]]:
        """By key, the outcomes of a fault's tests."""
        faults = [
            (key, {**vars(one), "block": one.changed(files[path]), "path": path, "tests": chosen[key]})
            for key, path, one in batch
            if chosen[key]
        ]
        collected = sorted({name.partition("::")[0] for names in chosen.values() for name in names})
        about = request(files, "mutants", collected, FAULT_SECONDS, test_seconds=FAULT_SECONDS / 2, mutants=faults)
        return {line[0]: line[1] for line in self._ask(files, about, BATCH_SECONDS) if isinstance(line, list)}

    def _ask(self, files: dict[str, bytes], about: dict[str, Any], seconds: float) -> list[Any]:
        with Sandbox(self._backend, LIMITS) as self._box:
            fill(self._box, files, runtime())
            lines = [] if self._is_stopped else asked(self._box, self._backend.python, about, seconds)
        if self._is_stopped:  # a part of a measurement must not be taken for all of it
            raise ConfigError("it was stopped")
        return lines

    def stop(self) -> None:
        """Let another thread's `run` end soon."""
        self._is_stopped = True
        if self._box is not None:
            self._box.close()


Candidate = tuple[str, str, Mutation]


def _candidates(
    files: dict[str, bytes], covering: dict[tuple[str, int], list[str]], known: dict[str, Any]
) -> Iterator[Candidate]:
    """Faults where tests come by, all kinds in turn, in an order that is the same each time."""
    found: dict[str, list[Candidate]] = defaultdict(list)
    for path, content in files.items():
        for one in mutations(content) if path.endswith(".py") else ():
            if one.end - one.start <= MAX_ORIGINAL and (path, one.covered_line) in covering:
                new = content[: one.start] + one.text.encode() + content[one.end :]
                key = sha256(path.encode() + new).hexdigest()[:16]  # two kinds may make the same program
                found[one.kind].append((key, path, one))
    turns = [(turn, each) for kind in found.values() for turn, each in enumerate(sorted(kind, key=lambda one: one[0]))]
    seen = set(known)
    for _, each in sorted(turns, key=lambda turn: (turn[0], turn[1][0])):
        if each[0] not in seen and each[2].changed(files[each[1]]):
            seen.add(each[0])
            yield each


def _chosen(tests: Tests, names: Sequence[str]) -> list[str]:
    """Tests that call little else and take little time."""
    chosen: list[str] = []
    left = MAX_TEST_TIME
    for name in sorted(names, key=lambda name: (len(tests[name][1]), tests[name][0])):
        if len(chosen) < MAX_TESTS and (left := left - tests[name][0]) > 0:
            chosen.append(name)
    return chosen


def _task(path: str, one: Mutation, content: bytes, outcomes: list[Any], tests: Tests) -> dict[str, Any]:
    """The task of a fault; {} where no test fails whose claims count, or none passes."""
    ended = [line for line in outcomes if len(line) > 1]
    failed = [line for line in ended if line[1] == "failed"]
    passed = [line[0] for line in ended if line[1] == "passed"]
    files = {line[0].partition("::")[0] for line in failed}
    seen = {line[0] for line in outcomes}
    others = (name for name in tests if name not in seen and name.partition("::")[0] in files)
    passed += islice(others, max(0, MIN_PASSED - len(passed)))
    canaries = [line[0] for line in failed if tests[line[0]][2]]
    if not canaries or not passed:
        return {}
    original = content[one.start : one.end].decode()
    return {
        "kind": one.kind,
        "level": 2 if one.kind == REMOVED_FUNCTION else int("\n" in original),
        "path": path,
        "start": one.start,
        "original": original,
        "text": one.text,
        "fail_to_pass": [line[0] for line in failed],
        "pass_to_pass": passed,
        "canaries": canaries,
        "failures": [[line[0], line[3]] for line in failed[:3]],
    }
