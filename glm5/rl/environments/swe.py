"""Faults to find and repair in Python packages: `swe/FOLDER`, with the tasks that `glm5 env make swe` wrote there.

Levels: changes within a line; within several; functions that are missing. The policy has the program in a box, without
the tests, and a shell. What it says without a tool call is the end. Then files of the program that it changed go into
new boxes with the package's own tests, in which nothing else of its box is left. The reward is 1 if the tests that
failed and those that passed before pass, and if the same tests fail in another box in which all that they claim is
wrong: that tells programs that change how tests are judged. Files that use more of `REFUSED` than the package does,
such as what reads the stack or leaves the process, are not run.
"""

import ast
import json
import re
import shlex
from collections import Counter
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
from glm5.rl.swe.package import asked, fill, is_test, packages, program, read_source, request, runtime, with_canaries

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


class Software(Environment):
    """`folder`: of tasks. Raises ConfigError where it has none."""

    num_turns = NUM_TURNS

    def __init__(self, folder: str, boxes: Boxes = NO_BOXES) -> None:
        self.folder, self.name, self._boxes = folder, f"{PREFIX}{Path(folder).name}", boxes
        levels: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
        for file in sorted(Path(folder).glob("*/tasks.jsonl")):
            for record in read_journal(file, ConfigError):
                if "kind" in record:
                    levels[record.pop("level")].append({"package": file.parent.name, **record})
        self._records = [sorted(of, key=lambda one: one["key"]) for of in levels.values() if of]
        if not self._records:
            raise ConfigError(f"{folder}: has no tasks; make some with  glm5 env make swe SOURCE... --out {folder}")
        if bad := left_out(folder):
            levels = dict(enumerate(self._records))
            kept = [
                [one for n, one in enumerate(of) if self.task(n, level).key not in bad] for level, of in levels.items()
            ]
            self._records = [of for of in kept if of]
            if not self._records:
                raise ConfigError(f"{self.name}: no task has passed glm5 env check")
        runtime()  # what is missing fails before the training
        self.levels, self.sandbox_levels = len(self._records), range(len(self._records))

    def task(self, seed: int, level: int) -> Task:
        record = self._records[level][seed % len(self._records[level])]
        failures = "\n".join(f"- {name}\n{_indented(told)}" for name, told in record["failures"])
        text = (
            f"The Python package in this folder ({record['package']}) does not do what it should. Tests of it, which "
            f"are not here, fail; {len(record['fail_to_pass'])} in all, such as:\n\n{failures}\n\nFind what is wrong "
            "in the package and repair it there. When you are done, answer without a tool call: then these and other "
            "tests run."
        )
        return Task(self.name, seed, level, ({"role": "user", "content": text},), record, (BASH,))

    def reset(self, task: Task) -> ToolEpisode:
        box = LazyBox(self._boxes, self._program(task))

        def bash(given: Mapping[str, Any]) -> str:
            if not isinstance(given["command"], str):
                raise ValueError("command must be text")
            return box.run_shell(given["command"], SHELL_SECONDS)

        return ToolEpisode(task, {"bash": bash}, lambda _: self._scored(task, box), NUM_TURNS, box)

    def oracle(self, task: Task) -> Sequence[Reply]:
        record = task.data
        start, original = record["start"], record["original"].encode()
        end = start + len(record["text"].encode())
        edit = f"p={record['path']!r}; s=open(p,'rb').read(); open(p,'wb').write(s[:{start}]+{original!r}+s[{end}:])"
        command = f"{shlex.quote(self._boxes.python)} -c {shlex.quote(edit)}"
        return [Reply("", tool_calls=[call("bash", command=command)]), Reply("It is repaired.")]

    def unsolved(self, task: Task) -> Sequence[Reply]:
        command = f"echo '# looked at' >> {shlex.quote(task.data['path'])}; find . -name '*.py' | head"
        return [Reply("", tool_calls=[call("bash", command=command)]), Reply("It is repaired.")]

    def hidden(self, task: Task) -> Sequence[str]:
        """The text around the fault as it was, and the names of the failing tests' functions."""
        record, files = task.data, _files(self.folder, task.data["package"])
        source, start = files[record["path"]], record["start"]
        end = source.find(b"\n", start + len(record["original"].encode()))
        right = source[source.rfind(b"\n", 0, max(0, source.rfind(b"\n", 0, start))) + 1 : end].decode()
        names = {name.split("::")[-1].partition("[")[0] for name in record["fail_to_pass"]}
        shown = b"\n".join(self._program(task).values()).decode(errors="replace")
        return [text for text in [right, *(f"def {name}(" for name in sorted(names))] if text not in shown]

    def _program(self, task: Task) -> dict[str, bytes]:
        """What the policy sees."""
        files = _files(self.folder, task.data["package"])
        return program(files) | {task.data["path"]: _faulty(files, task)}

    def _scored(self, task: Task, box: LazyBox) -> Turn:
        files = _files(self.folder, task.data["package"])
        start = self._program(task)
        try:
            changed = self._changed(box.open(), files, start)
        except (OSError, ValueError, RecursionError):
            changed = None  # the policy broke its box, or the listing
        if changed is None or any(
            _is_refused(text, start.get(path, b""), files.get(path, b"")) for path, text in changed.items()
        ):
            return Turn(is_done=True, rewards={"right": 0.0}, metrics={"refused": 1.0})
        record, repaired = task.data, files | {task.data["path"]: _faulty(files, task)} | changed
        wanted = [*record["fail_to_pass"], *record["pass_to_pass"]]
        outcomes = self._outcomes(repaired, wanted)
        num_passed = sum(outcomes.get(name) == "passed" for name in wanted)
        is_right = num_passed == len(wanted) and self._fails_where_it_must(repaired, wanted, record["canaries"])
        shares = {"passed": num_passed / len(wanted), "refused": 0.0}
        return Turn(is_done=True, rewards={"right": float(is_right)}, metrics=shares)

    def _fails_where_it_must(self, files: dict[str, bytes], wanted: Sequence[str], canaries: Sequence[str]) -> bool:
        """All tests run again, or a program could tell this box from the other by their number."""
        outcomes = self._outcomes(with_canaries(files, _files_of(wanted)), wanted)
        return all(outcomes.get(name) == "failed" for name in canaries)

    def _outcomes(self, files: dict[str, bytes], names: Sequence[str]) -> dict[str, str]:
        """In a new box, by the name of a test."""
        about = request(files, "grade", _files_of(names), GRADE_SECONDS, TEST_SECONDS, tests=list(names))
        box = self._boxes.open()
        with suppress(OSError), closing(box):
            fill(box, files, runtime())
            lines = asked(box, self._boxes.python, about, GRADE_SECONDS + 10)
            return {line[0]: line[1] for line in lines if isinstance(line, list) and len(line) > 1}
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


def _files_of(names: Sequence[str]) -> list[str]:
    return sorted({name.partition("::")[0] for name in names})


def _faulty(files: Mapping[str, bytes], task: Task) -> bytes:
    record, source = task.data, files[task.data["path"]]
    end = record["start"] + len(record["original"].encode())
    return source[: record["start"]] + record["text"].encode() + source[end:]


@lru_cache(maxsize=8)
def _files(folder: str, package: str) -> dict[str, bytes]:
    return read_source(Path(folder) / package / "source")


def _is_refused(changed: bytes, start: bytes, right: bytes) -> bool:
    """Whether a file uses more of `REFUSED` than it did at the start, and than it does without the fault."""
    before = _uses(start) | _uses(right)
    return any(count > before[name] for name, count in _uses(changed).items())


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
