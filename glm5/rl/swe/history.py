"""Tasks from a git repository: a commit that changes program and tests, and of whose tests some fail without it.

The start is the program of the commit's parent; tests and everything else are as in the commit. Merges count as one
commit, compared with their first parent. FOLDER/COMMIT.tar.gz has the files of a commit that became a task.

Programs that a repository's own settings name are not run: git reads a clone, with settings of its own.
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from glm5.common.atomic import atomic_write
from glm5.common.errors import ConfigError
from glm5.rl.swe.maker import Edit, Maker, edit, started, task_of
from glm5.rl.swe.outcomes import Outcome
from glm5.rl.swe.package import is_test, program, read_source
from glm5.rl.swe.package import test_files as tests_in

MAX_COMMITS, GIT_SECONDS, TEST_RUN_SECONDS = 2_000, 300.0, 60.0
MAX_CHANGED, MAX_MESSAGE, MAX_FAILED, MAX_PASSED = 40_000, 2_000, 300, 24
LEVEL, KIND = 3, "commit"
LOG = ("--first-parent", "--diff-merges=first-parent", "--no-renames", "--name-only", "--format=%x00%H%n%B%x01")


@dataclass(frozen=True)
class Commit:
    """`names`: of files that it changed."""

    key: str
    message: str
    names: frozenset[str]


class History(Maker):
    def tried(self) -> Iterator[tuple[str, dict[str, Any]]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as folder:
            repository = _Repository(Path(folder), self.source)
            for place, commit in enumerate(repository.commits()):
                if commit.key not in self.known:
                    yield commit.key, self._task(repository, commit, is_first=place == 0)

    def _task(self, repository: "_Repository", commit: Commit, *, is_first: bool) -> dict[str, Any]:
        try:
            before = read_source(repository.archive(f"{commit.key}^"))
            files = read_source(archive := repository.archive(commit.key))
        except ConfigError:
            return {}  # it is too large
        if is_first:
            self.refuse_known(files)
        edits = _edits(program(files), program(before))
        if not edits or sum(len(right) + len(wrong or "") for _, _, right, wrong in edits) > MAX_CHANGED:
            return {}
        collected = sorted(tests_in(files), key=lambda name: (name not in commit.names, name))
        tests = self.measured(files, collected, TEST_RUN_SECONDS)
        (outcomes,) = self.ran(started(files, edits), collected, seconds=TEST_RUN_SECONDS) or [{}]
        passed = [name for name in tests if name in outcomes and outcomes[name].outcome == "passed"]
        failed = [_failed(name, outcomes) for name in tests if name not in passed and _file(name) in commit.names]
        if not outcomes or len(failed) > MAX_FAILED:
            return {}
        names = {"source": f"{commit.key[:12]}.tar.gz", "message": commit.message}
        task = task_of(tests, failed, passed[:MAX_PASSED], edits, kind=KIND, level=LEVEL, **names)
        if task:
            with atomic_write(self.folder / names["source"], "wb") as handle:
                handle.write(archive.read_bytes())
        return task


def _file(name: str) -> str:
    return name.partition("::")[0]


def _failed(name: str, outcomes: Mapping[str, Outcome]) -> Outcome:
    """What the start makes of a test, or else of its file."""
    told = (outcomes.get(name) or outcomes.get(_file(name)) or Outcome(name, "", 0, "it is not there", [])).told
    return Outcome(name, "failed", 0, told, [])


def _edits(right: Mapping[str, bytes], wrong: Mapping[str, bytes]) -> list[Edit]:
    """Between two programs; none where the solution takes files away or only adds some, or changes what is no text."""
    if any(path.endswith(".py") and path not in right for path in wrong):
        return []
    changed = [path for path, content in right.items() if path.endswith(".py") and content != wrong.get(path)]
    if not any(path in wrong for path in changed):
        return []
    try:
        return [edit(path, right[path].decode(), wrong[path].decode() if path in wrong else None) for path in changed]
    except UnicodeDecodeError:
        return []


class _Repository:
    """A clone of `source` in a folder. Raises ConfigError with what git says."""

    def __init__(self, folder: Path, source: Path) -> None:
        self._folder, self._git = folder, shutil.which("git")
        if self._git is None:
            raise ConfigError(f"{source} is a git repository: reading it needs the program git")
        self._run("clone", "--bare", "--no-local", "--single-branch", "--no-tags", str(source.absolute()), "clone")
        # Archives have all files, as they are.
        (folder / "clone/info").mkdir(exist_ok=True)
        (folder / "clone/info/attributes").write_text("* !export-ignore !export-subst -text -ident\n")

    def _run(self, *args: str) -> str:
        environment = {"HOME": str(self._folder), "GIT_CONFIG_NOSYSTEM": "1", "PATH": "/usr/bin:/bin"}
        argv = [str(self._git), "-c", "core.quotePath=false", *args]
        try:
            done = subprocess.run(argv, cwd=self._folder, env=environment, capture_output=True, timeout=GIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"git {args[0]} took more than {GIT_SECONDS:g} s") from None
        if done.returncode:
            raise ConfigError(f"git {args[0]}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode(errors="replace")

    def commits(self) -> Iterator[Commit]:
        """The newest first, that change Python files of tests and others."""
        log = self._run("--git-dir=clone", "log", f"--max-count={MAX_COMMITS}", "--min-parents=1", *LOG)
        for each in log.split("\0")[1:]:
            head, _, names = each.partition("\1")
            key, _, message = head.partition("\n")
            changed = frozenset(names.split("\n"))
            python = [name for name in changed if name.endswith(".py")]
            if any(map(is_test, python)) and not all(map(is_test, python)):
                yield Commit(key, message.strip()[:MAX_MESSAGE], changed)

    def archive(self, commit: str) -> Path:
        """Its files, until the next call."""
        file = self._folder / "files.tar.gz"
        self._run("--git-dir=clone", "archive", "--format=tar.gz", "--prefix=top/", f"--output={file}", commit)
        return file
