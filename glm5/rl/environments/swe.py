"""Faults to find and repair in Python packages: `swe/FOLDER`, with the tasks that `glm5 env make swe` wrote there.

Levels: changes within a line; within several; functions that are missing; commits of a repository. The policy has the
program in a box, without the tests, and a shell. What it says without a tool call is the end. Then files of the program
that it changed go into new boxes with the package's own tests, in which nothing else of its box is left. The reward is
1 if the tests that failed and those that passed before pass, and if the same tests fail in another box in which all
that they claim is wrong: that tells programs that change how tests are judged. Files that use more of `REFUSED` than
the package does, such as what reads the stack or leaves the process, are not run.
"""

import ast
import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from glm5.common.errors import ConfigError
from glm5.common.journal import read_journal
from glm5.rl.environments.boxes import NO_BOXES, Boxes
from glm5.rl.environments.protocol import Environment, Reply, Task, Turn, left_out
from glm5.rl.environments.tool_use import LazyBox, ToolEpisode, call, function_tool
from glm5.rl.sandbox.sandbox import Sandbox
from glm5.rl.swe.maker import Edit, started
from glm5.rl.swe.outcomes import QUIET, run_tests, runtime, with_canaries
from glm5.rl.swe.package import is_test, packages, program, read_source

PREFIX = "swe/"
NUM_TURNS, SHELL_SECONDS, TEST_SECONDS, GRADE_SECONDS = 40, 30.0, 10.0, 90.0
MAX_CHANGED, MAX_FILES = 1_000_000, 20
REFUSED = re.compile(
    "_?pytest|pluggy|unittest|doctest|(__)?builtins(__)?|gc|ctypes|atexit|signal|inspect|traceback|_exit|fork|kill|settrace"
    "|setprofile|_getframe|f_back|f_globals|f_locals|tb_frame|tb_next|__globals__|__code__|__subclasses__|__import__|eval"
    "|import_module|importlib|exec|compile|globals|meta_path|path_hooks|modules|excepthook|AssertionError|TestCase|popen"
    "|multiprocessing|subprocess|threading|marshal|pickle|mmap|system"
)
BASH = function_tool("bash", "Run a command in the folder of the package.", command="a line of shell")
# The files of a program that differ from these digests, as JSON.
_CHANGED = """\
import hashlib, json, os, sys
known, changed = json.load(sys.stdin), {}
for folder, folders, names in os.walk("."):
    folders[:] = [name for name in folders if not name.startswith(".")]
    for name in names:
        path = os.path.relpath(os.path.join(folder, name))
        if name.endswith(".py") and os.path.isfile(path) and not os.path.islink(path):
            content = open(path, "rb").read(1000000)
            if hashlib.sha256(content).hexdigest() != known.get(path):
                changed[path] = content.decode(errors="replace")
json.dump(changed, open("/tmp/changed", "w"))
os.replace("/tmp/changed", "changed.json")
"""
_REPAIR = """
import os
for path, start, right, length in EDITS:
    old = open(path, "rb").read() if os.path.exists(path) else b""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    open(path, "wb").write(old[:start] + right.encode() + old[start + length:])
"""


class Software(Environment):
    """`folder`: of tasks. Raises ConfigError where it has none."""

    num_turns = NUM_TURNS

    def __init__(self, folder: str, boxes: Boxes = NO_BOXES) -> None:
        self.folder, self.name, self._boxes = folder, f"{PREFIX}{Path(folder).name}", boxes
        levels: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for file in sorted(Path(folder).glob("*/tasks.jsonl")):
            for record in read_journal(file, ConfigError):
                if "kind" in record:
                    levels[record.pop("level")].append({"package": file.parent.name, **record})
        self._records = [sorted(levels[level], key=lambda one: one["key"]) for level in sorted(levels)]
        if not self._records:
            raise ConfigError(f"{folder}: has no tasks; make some with  glm5 env make swe SOURCE... --out {folder}")
        if bad := left_out(folder):
            passed = [
                [one for n, one in enumerate(of) if self.task(n, level).key not in bad]
                for level, of in enumerate(self._records)
            ]
            self._records = [of for of in passed if of]
            if not self._records:
                raise ConfigError(f"{self.name}: no task has passed glm5 env check")
        runtime()  # what is missing fails before the training
        self.levels, self.sandbox_levels = len(self._records), range(len(self._records))

    def task(self, seed: int, level: int) -> Task:
        record = self._records[level][seed % len(self._records[level])]
        failures = "\n".join(f"- {name}\n{_indented(told)}" for name, told in record["failures"])
        wanted = f" What is wanted:\n\n{_indented(record['message'])}\n\n" if "message" in record else " "
        text = (
            f"The Python package in this folder ({record['package']}) does not do what it should.{wanted}Tests of it, "
            f"which are not here, fail; {len(record['fail_to_pass'])} in all, such as:\n\n{failures}\n\nFind what is "
            "wrong in the package and repair it there. When you are done, answer without a tool call: then these and "
            "other tests run."
        )
        return Task(self.name, seed, level, ({"role": "user", "content": text},), record, (BASH,))

    def reset(self, task: Task) -> ToolEpisode:
        box = LazyBox(self._boxes, self._program(task))
        tools = {"bash": lambda given: box.run_shell(given["command"], SHELL_SECONDS)}
        return ToolEpisode(task, tools, lambda _: self._scored(task, box), NUM_TURNS, box)

    def oracle(self, task: Task) -> Sequence[Reply]:
        """Of a fault within a line: a look at the function around it, and the line anew."""
        if (commands := _at_the_line(task.data["edits"], self._program(task))) is not None:
            return [*(Reply("", tool_calls=[call("bash", command=one)]) for one in commands), Reply("It is repaired.")]
        edits = [(path, start, right, len((wrong or "").encode())) for path, start, right, wrong in task.data["edits"]]
        python = shlex.quote(self._boxes.python)
        command = f"{python} -c {shlex.quote(f'EDITS = {edits!r}{_REPAIR}')}"
        return [Reply("", tool_calls=[call("bash", command=command)]), Reply("It is repaired.")]

    def unsolved(self, task: Task) -> Sequence[Reply]:
        path = next(path for path, _, _, wrong in task.data["edits"] if wrong is not None)
        command = f"echo '# looked at' >> {shlex.quote(path)}; find . -name '*.py' | head"
        return [Reply("", tool_calls=[call("bash", command=command)]), Reply("It is repaired.")]

    def hidden(self, task: Task) -> Sequence[str]:
        """The text around the faults as it was, and the names of the failing tests' functions."""
        record, files = task.data, self._files(task)
        texts = [f"def {name.split('::')[-1].partition('[')[0]}(" for name in record["fail_to_pass"]]
        for path, start, right, _ in record["edits"]:
            content = files[path]
            end = content.find(b"\n", start + len(right.encode()))
            begin = content.rfind(b"\n", 0, max(0, content.rfind(b"\n", 0, start))) + 1
            texts.append(content[begin:end].decode())
        shown = b"\n".join(self._program(task).values()).decode(errors="replace")
        return [text for text in dict.fromkeys(texts) if text not in shown]

    def _files(self, task: Task) -> dict[str, bytes]:
        """What solves the task."""
        return _read(Path(self.folder) / task.data["package"] / task.data.get("source", "source"))

    def _program(self, task: Task) -> dict[str, bytes]:
        """What the policy sees."""
        return program(started(self._files(task), task.data["edits"]))

    def _scored(self, task: Task, box: LazyBox) -> Turn:
        record, files, start = task.data, self._files(task), self._program(task)
        try:
            changed = self._changed(box.open(), files, start)
        except (OSError, ValueError, RecursionError):
            changed = None  # the policy broke its box, or the listing
        if changed is None or any(
            _is_refused(text, start.get(path, b""), files.get(path, b"")) for path, text in changed.items()
        ):
            return Turn(is_done=True, rewards={"right": 0.0}, metrics={"refused": 1.0})
        wanted = [*record["fail_to_pass"], *record["pass_to_pass"]]
        num_passed, is_right = len(record["pass_to_pass"]), False
        if changed:  # otherwise all is as when the task was made
            repaired = started(files, record["edits"]) | changed
            outcomes = self._outcomes(repaired, wanted)
            num_passed = sum(outcomes.get(name) == "passed" for name in wanted)
            is_right = num_passed == len(wanted) and self._fails_where_it_must(repaired, wanted, record["canaries"])
        shares = {"passed": num_passed / len(wanted), "refused": 0.0}
        return Turn(is_done=True, rewards={"right": float(is_right)}, metrics=shares)

    def _fails_where_it_must(self, files: dict[str, bytes], wanted: Sequence[str], canaries: Sequence[str]) -> bool:
        """All tests run again, or a program could tell this box from the other by their number."""
        outcomes = self._outcomes(with_canaries(files), wanted)
        return all(outcomes.get(name) == "failed" for name in canaries)

    def _outcomes(self, files: dict[str, bytes], names: Sequence[str]) -> dict[str, str]:
        """In a new box, by the name of a test."""
        times = {"seconds": GRADE_SECONDS, "test_seconds": TEST_SECONDS}
        with suppress(OSError), closing(self._boxes.open()) as box:
            of, runs = _files_of(names), [{"tests": list(names)}]
            told = run_tests(box, self._boxes.python, files, of, runs, is_loaded=False, options=QUIET, **times)
            return {name: one.outcome for each in told for name, one in each.items()}
        return {}

    def _changed(self, box: Sandbox, files: Mapping[str, bytes], start: Mapping[str, bytes]) -> dict[str, bytes] | None:
        """Files of the program that are not as at the start; None where there are too many. ValueError for no JSON."""
        digests = {path: sha256(content).hexdigest() for path, content in start.items()}
        box.run(
            [self._boxes.python, "-I", "-S", "-c", _CHANGED], timeout=SHELL_SECONDS, stdin=json.dumps(digests).encode()
        )
        found = json.loads(box.read("changed.json"))
        if not isinstance(found, dict):
            raise ValueError("the policy put another list there")
        changed = {
            path: str(text).encode(errors="replace")
            for path, text in cast("dict[str, Any]", found).items()
            if path in start or (path.startswith(tuple(packages(files))) and not is_test(path))
        }
        is_small = len(changed) <= MAX_FILES and all(len(content) <= MAX_CHANGED for content in changed.values())
        return changed if is_small else None


def _at_the_line(edits: Sequence[Edit], program: Mapping[str, bytes]) -> list[str] | None:
    """Shell that shows the function around a fault, 30 lines at a time, and that puts the right line there; None where
    the fault is not within a line of a function."""
    path, start, right, wrong = edits[0]
    if len(edits) > 1 or wrong is None or "\n" in f"{right}{wrong}":
        return None
    before = program[path][:start].decode().split("\n")
    rest = program[path][start + len(wrong.encode()) :].decode().partition("\n")[0]
    functions = [number for number, line in enumerate(before) if line.lstrip().startswith("def ")]
    if not functions:
        return None
    name, shown = before[functions[-1]].partition("(")[0].strip(), 30 * (1 + (len(before) - functions[-1]) // 30)
    line = f"{before[-1]}{right}{rest}".replace("\\", r"\\")
    repair = rf"{len(before)}c\{line}"
    file = shlex.quote(path)
    return [f"grep -n -A{shown} {shlex.quote(name)} {file}", f"sed -i {shlex.quote(repair)} {file}"]


def _files_of(names: Sequence[str]) -> list[str]:
    return sorted({name.partition("::")[0] for name in names})


@lru_cache(maxsize=8)
def _read(source: Path) -> dict[str, bytes]:
    return read_source(source)


def _is_refused(changed: bytes, start: bytes, right: bytes) -> bool:
    """Whether a file uses more of `REFUSED` than it did at the start, and than it does without the fault."""
    before = _uses(start) | _uses(right)
    return any(count > before[name] for name, count in _uses(changed).items())


@lru_cache(maxsize=64)
def _uses(content: bytes) -> Counter[str]:
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return Counter()
    names = [getattr(node, key, None) for node in nodes for key in ("id", "attr", "name", "module", "value", "arg")]
    words = (part for name in names if isinstance(name, str) for part in name.split("."))
    return Counter(word for word in words if REFUSED.fullmatch(word))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[:12])
