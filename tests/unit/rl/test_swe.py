"""Tasks of software engineering: made, solved, checked; and cheats, none of which is rewarded."""

import json
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from glm5.common.errors import ConfigError
from glm5.config.env import EnvCheckConfig, EnvMakeConfig
from glm5.rl.check import check
from glm5.rl.environments import swe
from glm5.rl.environments.boxes import Boxes
from glm5.rl.environments.protocol import LEFT_OUT, Reply, Task
from glm5.rl.environments.table import make
from glm5.rl.environments.tool_use import call
from glm5.rl.sandbox.choice import choose_backend
from glm5.rl.sandbox.sandbox import Sandbox
from glm5.rl.swe.make import make_tasks
from glm5.rl.swe.maker import edit
from glm5.rl.swe.mutations import mutations
from glm5.rl.swe.outcomes import canary, with_canaries
from glm5.rl.swe.package import is_test, program, read_source
from glm5.rl.swe.package import test_files as collected
from tests.support.software import IN_FOLDER, IN_PROCESS, RIGHT, WRONG, git, write_package, write_repository


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("swe")
    source = write_package(top / "sums-1.0")
    told = make_tasks(EnvMakeConfig(source=(str(source),), out=str(top / "tasks"), tasks=60, workers=1))
    assert "sums-1.0: " in told
    return top / "tasks"


@pytest.fixture(scope="module")
def environment(folder):
    backend = choose_backend()
    return make(f"swe/{folder}", Boxes(lambda: Sandbox(backend), backend.python))


def all_tasks(environment) -> list[Task]:
    tasks = [environment.task(seed, level) for level in range(environment.levels) for seed in range(60)]
    return list({task.key: task for task in tasks}.values())


@pytest.fixture(scope="module")
def task(environment) -> Task:
    (found,) = [
        one for one in all_tasks(environment) if WRONG in environment._program(one)["sums/__init__.py"].decode()
    ]
    return found


def play(environment, task, *commands: str) -> float:
    episode = environment.reset(task)
    try:
        for command in commands:
            turn = episode.step(Reply("", tool_calls=[call("bash", command=command)]))
            assert not turn.is_done
        turn = episode.step(Reply("Done."))
        assert turn.is_done
        return turn.rewards["right"]
    finally:
        episode.close()


def test_kinds_of_faults():
    text = '''
async def f(a, b, c=3, *, d=None):
    """Text."""
    for i in range(a):
        if a < b and not c or i == 2:
            continue
        try:
            a += b * 2 - 1
        except ValueError as error:
            raise KeyError("text") from error
        else:
            break
    a.b.append(c)
    await g(a, b, key=min(a, b))
    x = [y.strip() for y in a[1:-1] if y]
    return (x if a else b), a & b, a @ b, True
'''
    found = list(mutations(text.encode()))
    changed = [one for one in found if one.changed(text.encode())]
    assert len({one.kind for one in changed}) >= 25, sorted({one.kind for one in changed})
    assert all(text[: one.start] in one.changed(text.encode()) or one.start > 0 for one in changed)
    assert list(mutations(b"def f(:")) == [] == list(mutations(b"\xff"))


def test_what_is_a_test_and_what_the_program(tmp_path):
    files = read_source(write_package(tmp_path / "sums-1.0"))
    assert list(program(files)) == ["sums/__init__.py"]
    assert collected({"a/tests.py": b"", "a/b_test.py": b"", "a/conftest.py": b"", "a/tests/data.py": b""}) == [
        "a/b_test.py",
        "a/tests.py",
    ]
    assert is_test("a/tests/data.json")
    assert is_test("a/test_b.py")
    assert not is_test("a/testament.py")


def test_a_canary_claims_the_opposite():
    text = canary(b"def test(self):\n    assert f() == 1\n    assert g()\n    self.assertEqual(f(), 1)\n")
    assert text.decode().count("object()") == 3
    assert b"not g()" in text


@pytest.mark.parametrize("claim", ["assert f() == 1", "assert 1 == f()"])
def test_a_canary_holds_only_for_what_equals_everything(claim):
    with pytest.raises(AssertionError):
        exec(canary(claim.encode()), {"f": lambda: 1})
    exec(canary(claim.encode()), {"f": lambda: mock.ANY})


def test_claims_beside_the_tests_have_canaries_too():
    files = with_canaries({"a/tests/common.py": b"assert x", "a/tests/conftest.py": b"assert x", "a/b.py": b"assert x"})
    assert [path for path, text in files.items() if b"not" in text] == ["a/tests/common.py"]


def test_tasks_and_their_gates(environment, folder, task):
    kinds = {one.data["kind"] for one in all_tasks(environment)}
    assert len(kinds) >= 12, kinds
    shown = json.dumps(task.messages)
    assert "test_total" in shown
    assert RIGHT not in shown
    assert play(environment, task) == 0
    assert play(environment, task, f"sed -i 's/{WRONG}/{RIGHT}/' sums/__init__.py") == 1
    assert "test_sums" not in environment._program(task)
    records = [json.loads(line) for line in (folder / "sums-1.0/tasks.jsonl").read_text().splitlines()]
    assert len({one["key"] for one in records}) == len(records)
    assert any("kind" not in one for one in records), "no fault went unnoticed"


def test_a_solution_within_a_line_looks_first(environment, task):
    commands = [each["function"]["arguments"]["command"] for one in environment.oracle(task) for each in one.tool_calls]
    assert commands[0] == "grep -n -A30 'def total' sums/__init__.py"
    assert play(environment, task, commands[0]) == 0
    assert play(environment, task, *commands) == 1


def test_a_line_with_quotes_and_backslashes_is_repaired(tmp_path):
    right = "def f(x):\n    return re.sub('\\\\d+', \"'\", x)\n\n# end\n"
    wrong = right.replace("d+", "w+")
    (tmp_path / "a b.py").write_text(wrong)
    edits = [edit("a b.py", right, wrong)]
    commands = swe._at_the_line(edits, {"a b.py": wrong.encode()})
    told = [subprocess.run(["bash", "-c", one], cwd=tmp_path, check=True, capture_output=True) for one in commands]
    assert b"2-    return re.sub" in told[0].stdout
    assert (tmp_path / "a b.py").read_text() == right
    assert swe._at_the_line(edits * 2, {"a b.py": wrong.encode()}) is None
    assert swe._at_the_line([("a.py", 0, "x = 1", "x = 2")], {"a.py": b"x = 2\n"}) is None
    assert swe._at_the_line([("a.py", 9, "1\n  2", "3")], {"a.py": b"def f():\n3\n"}) is None


def test_the_same_command_goes_on(folder):
    """A half line of a killed process is forgotten, and nothing is made twice."""
    journal, top = folder / "sums-1.0/tasks.jsonl", folder.parent
    before = journal.read_text()
    journal.write_text(before[:-20])
    make_tasks(EnvMakeConfig(source=(str(top / "sums-1.0"),), out=str(folder), tasks=60, workers=1))
    assert sorted(journal.read_text().splitlines()) == sorted(before.splitlines())


def test_a_commit_becomes_a_task(tmp_path):
    """Of a repository: one that changes program and tests, where tests fail without it; its own programs do not run."""
    source = write_repository(tmp_path / "sums")
    git(source, "config", "filter.planted.smudge", f"touch {tmp_path}/planted")
    settings = EnvMakeConfig(source=(str(source),), out=str(tmp_path / "out"), workers=1)
    assert "1 tasks, 2 tried" in make_tasks(settings)
    journal = tmp_path / "out/sums/tasks.jsonl"
    before = journal.read_text()
    assert "1 tasks, 2 tried" in make_tasks(settings)
    assert journal.read_text() == before
    assert not (tmp_path / "planted").exists()
    backend = choose_backend()
    environment = make(f"swe/{tmp_path}/out", Boxes(lambda: Sandbox(backend), backend.python))
    task = environment.task(0, 0)
    assert task.data["fail_to_pass"] == ["tests/test_sums.py::test_total"]
    assert len(task.data["pass_to_pass"]) == 6
    assert "See issue 3." in task.messages[0]["content"]
    assert "def total(values):" in environment._program(task)["sums/__init__.py"].decode()
    assert {"result = start", "def test_total("} <= {text.split("\n")[-1].strip() for text in environment.hidden(task)}
    assert (
        play(
            environment,
            task,
            *[one["function"]["arguments"]["command"] for one in environment.oracle(task)[0].tool_calls],
        )
        == 1
    )
    assert play(environment, task, environment.unsolved(task)[0].tool_calls[0]["function"]["arguments"]["command"]) == 0


def test_sources_that_cannot_be_used(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no task was made: a: skipped:"):
        make_tasks(EnvMakeConfig(source=(str(tmp_path / "a.tar.gz"),), out=str(tmp_path / "out")))
    with pytest.raises(ConfigError, match="has no tasks"):
        make(f"swe/{tmp_path}")


def test_check_lists_what_does_not_pass(tmp_path, monkeypatch):
    class Generous(type(make("guess"))):
        folder = str(tmp_path)

        def unsolved(self, task):
            return self.oracle(task)  # the control: these are solutions

    monkeypatch.setattr("glm5.rl.check.make", lambda name, boxes: Generous())
    table, has_passed = check(EnvCheckConfig(name="generous", tasks=3, workers=1))
    assert not has_passed
    assert "unsolved" in table
    keys = (tmp_path / LEFT_OUT).read_text().split()
    assert len(keys) == 3
    rows = (tmp_path / "checked.jsonl").read_text().splitlines()
    assert len(rows) == 3
    check(EnvCheckConfig(name="generous", tasks=3, workers=1))  # all are known
    assert (tmp_path / "checked.jsonl").read_text().splitlines() == rows


def test_check_notices_a_box_with_the_solution(tmp_path, monkeypatch):
    """The control: an environment whose `hidden` has a text that the policy's box holds."""
    real = make("terminal")

    class Shown(type(real)):
        levels = 1

        def hidden(self, task):
            return ["planted"]

        def unsolved(self, task):
            return [Reply("", tool_calls=[call("bash", command="echo planted > x")]), Reply("")]

    monkeypatch.setattr("glm5.rl.check.make", lambda name, boxes: Shown(boxes))
    table, has_passed = check(EnvCheckConfig(name="terminal", tasks=1, out=str(tmp_path), workers=1))
    assert not has_passed
    (row,) = (json.loads(line) for line in (tmp_path / "checked.jsonl").read_text().splitlines())
    assert list(row["failed"]) == ["hidden"], table


def test_check_of_an_environment_that_passes(tmp_path):
    table, has_passed = check(EnvCheckConfig(name="grid", tasks=5, out=str(tmp_path), workers=1))
    assert has_passed, table


@pytest.mark.slow
def test_check_of_software(folder, environment):
    table, has_passed = check(EnvCheckConfig(name=f"swe/{folder}", tasks=3, workers=1))
    assert has_passed, table
    key = environment.task(0, 0).key
    (folder / LEFT_OUT).write_text(f"{key}\n")
    try:
        assert key not in {one.key for one in all_tasks(make(f"swe/{folder}"))}
    finally:
        (folder / LEFT_OUT).unlink()


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FOLDER | IN_PROCESS)
def test_cheats_are_not_rewarded(environment, task, name):
    assert play(environment, task, (IN_FOLDER | IN_PROCESS)[name]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PROCESS)
def test_cheats_that_are_run_are_not_rewarded(environment, task, name, monkeypatch):
    """Without the list of refused names, which a program may get around."""
    monkeypatch.setattr(swe, "REFUSED", re.compile("(?!)"))
    assert play(environment, task, IN_PROCESS[name]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["equal to everything", "reports patched", "results forged with the nonce"])
def test_canaries_are_needed(environment, task, name, monkeypatch):
    """The control: these cheats work where no canary is run."""
    monkeypatch.setattr(swe, "REFUSED", re.compile("(?!)"))
    monkeypatch.setattr(swe.Software, "_fails_where_it_must", lambda *_: True)
    assert play(environment, task, IN_PROCESS[name]) == 1
