"""Tasks from a package with tests: each is a fault that some test notices and some other does not.

    FOLDER/source/       the package, as it was
    FOLDER/tests.json    its tests that pass, with the functions that they call

Of a fault, those tests run that call the changed function, the most particular first.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any

import msgspec

from glm5.common.atomic import atomic_dir, atomic_write_json
from glm5.common.bounded import TABLES, read_bounded
from glm5.common.errors import ConfigError
from glm5.rl.swe.maker import Maker, Test, task_of
from glm5.rl.swe.mutations import REMOVED_FUNCTION, Mutation, mutations
from glm5.rl.swe.outcomes import Outcome
from glm5.rl.swe.package import program, read_source
from glm5.rl.swe.package import test_files as tests_in

MEASURE_SECONDS, FAULT_SECONDS, BATCH_SECONDS = 240.0, 4.0, 200.0
BATCH, MAX_TESTS, MAX_TEST_TIME, MIN_PASSED, MAX_ORIGINAL = 100, 24, 1.0, 6, 8_000
Candidate = tuple[str, str, Mutation]
Covering = Mapping[tuple[str, int], Sequence[str]]


class Faults(Maker):
    def tried(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self.folder.exists():
            self._measure()
        files = read_source(self.folder / "source")
        content = read_bounded(self.folder / "tests.json", TABLES, ConfigError)
        tests = msgspec.json.decode(content, type=dict[str, Test])
        covering: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name, test in tests.items():
            for place in test.called:
                covering[place].append(name)
        chosen = {place: _chosen(tests, names) for place, names in covering.items()}
        candidates = _candidates(program(files), chosen, self.known)
        while batch := list(islice(candidates, BATCH)):
            runs = [
                {
                    "tests": chosen[path, one.covered_line],
                    "fault": {**vars(one), "path": path, "block": one.changed(files[path])},
                }
                for _, path, one in batch
            ]
            collected = sorted({name.partition("::")[0] for run in runs for name in run["tests"]})
            times = {"seconds": FAULT_SECONDS, "test_seconds": FAULT_SECONDS / 2, "limit": BATCH_SECONDS}
            outcomes = self.ran(files, collected, runs, **times)
            for (key, path, one), of in zip(batch, outcomes, strict=False):  # the next run tries what had no time
                yield key, _task(path, one, files[path], of, tests)
            if not outcomes:
                return

    def _measure(self) -> None:
        """Copy the package and run its tests. ConfigError where they cannot be used."""
        files = read_source(self.source)
        self.refuse_known(files)
        tests = self.measured(files, tests_in(files), MEASURE_SECONDS)
        if len(tests) < 2:
            raise ConfigError("no two of its tests pass here: what they import may be missing")
        with atomic_dir(self.folder) as folder:
            for path, content in files.items():
                (folder / "source" / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "source" / path).write_bytes(content)
            atomic_write_json(folder / "tests.json", tests)


def _candidates(files: Mapping[str, bytes], chosen: Covering, known: Mapping[str, Any]) -> Iterator[Candidate]:
    """Faults where tests come by, all kinds in turn, in an order that is the same each time."""
    found: dict[str, list[Candidate]] = defaultdict(list)
    for path, content in files.items():
        for one in mutations(content) if path.endswith(".py") else ():
            if one.end - one.start <= MAX_ORIGINAL and chosen.get((path, one.covered_line)):
                new = content[: one.start] + one.text.encode() + content[one.end :]
                key = sha256(path.encode() + new).hexdigest()[:16]  # two kinds may make the same program
                found[one.kind].append((key, path, one))
    turns = [(turn, each) for kind in found.values() for turn, each in enumerate(sorted(kind, key=lambda one: one[0]))]
    seen = set(known)
    for _, each in sorted(turns, key=lambda turn: (turn[0], turn[1][0])):
        if each[0] not in seen and each[2].changed(files[each[1]]):
            seen.add(each[0])
            yield each


def _chosen(tests: Mapping[str, Test], names: Sequence[str]) -> list[str]:
    """Tests that call little else and take little time."""
    chosen: list[str] = []
    left = MAX_TEST_TIME
    for name in sorted(names, key=lambda name: (len(tests[name].called), tests[name].seconds)):
        if len(chosen) < MAX_TESTS and (left := left - tests[name].seconds) > 0:
            chosen.append(name)
    return chosen


def _task(
    path: str, one: Mutation, content: bytes, outcomes: Mapping[str, Outcome], tests: Mapping[str, Test]
) -> dict[str, Any]:
    failed = [each for each in outcomes.values() if each.outcome == "failed" and each.test in tests]
    passed = [name for name, each in outcomes.items() if each.outcome == "passed"]
    files = {each.test.partition("::")[0] for each in failed}
    others = (name for name in tests if name not in outcomes and name.partition("::")[0] in files)
    passed += islice(others, max(0, MIN_PASSED - len(passed)))
    original = content[one.start : one.end].decode()
    level = 2 if one.kind == REMOVED_FUNCTION else int("\n" in original)
    return task_of(tests, failed, passed, [(path, one.start, original, one.text)], kind=one.kind, level=level)
