"""Runs a package's tests in a box: `python -I -S -B runner.py`, with a request on standard input.

    files, path     what pytest collects, and the folders to import from
    is_loaded       tests are collected once, and each run is a fork of that; or each fork collects them itself
    runs            tests (none: all), is_traced, fault: what the fork changes in the loaded program first
    seconds, test_seconds, options    for each fork, for each test, and more options of pytest

The answer has a line for each run: a list of [test, outcome, seconds, what it said, functions that it called].

Without `is_loaded` this process never runs the package's code. Its forks cannot read it (it is not dumpable), and it
believes only lines of a fork that begin with a nonce made for it.
"""

import ast
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

Tell = Callable[[Any], object]
Request = Mapping[str, Any]
REPO = os.path.abspath("repo") + "/"
MAX_BYTES, MAX_TOLD = 10_000_000, 600
# What pytest imports for colours, which nobody sees.
PYGMENTS = [f"pygments{name}" for name in ("", ".formatters", ".formatters.terminal", ".lexer", ".lexers", ".util")]
PYGMENTS += ["pygments.lexers.diff", "pygments.lexers.python"]  # pyright: ignore[reportConstantRedefinition]


class StandIn:
    """A module that has whatever is asked of it."""

    __path__, __spec__ = (), None

    def __getattr__(self, name: str) -> type:
        return Exception


def main() -> None:
    request = json.load(sys.stdin)
    answers = os.dup(1)
    for fd in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    gc.disable()  # until tests run
    sys.path.append(os.path.abspath("runtime.zip"))
    with open("pytest.ini", "w") as file:
        file.write("[pytest]\n")
    for name in PYGMENTS:
        sys.modules[name] = cast("Any", StandIn())
    for name in ("pytest", "pluggy"):  # before the package's folders are on the path
        __import__(name)
    vars(sys.modules["pluggy"])["__version__"] = ""  # the zip file has no metadata
    for name in PYGMENTS:
        del sys.modules[name]

    def tell(answer: Any) -> None:
        data = memoryview(f"{json.dumps(answer)}\n".encode())
        while data:
            data = data[os.write(answers, data) :]

    if request["is_loaded"]:
        collect(request, lambda tests: in_forks(tests, request, tell))
    else:
        for run in request["runs"]:
            tell(forked(lambda tell, run=run: collect(request, lambda tests: tests.play(run, tell)), request))
    os._exit(0)


def collect(request: Request, work: Callable[["Tests"], None]) -> None:
    """Call `work` with the tests of the files, where pytest would run them."""
    config = [f"-c{os.path.abspath('pytest.ini')}", "-pno:cacheprovider", "--continue-on-collection-errors"]
    os.chdir("repo")
    sys.path[:0] = [os.path.abspath(path) for path in request["path"]]
    options = [*config, *request["options"], f"--rootdir={os.getcwd()}", *request["files"]]
    sys.modules["pytest"].main(options, plugins=[Tests(request["test_seconds"], work)])


def forked(work: Callable[[Tell], None], request: Request) -> list[Any]:
    """What `work(tell)` told in a fork, which is ended after some time."""
    nonce, (out, into) = os.urandom(16).hex(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(out)
        try:
            work(lambda line: os.write(into, f"{nonce}{json.dumps(line)}\n".encode()))
        finally:
            os._exit(0)
    os.close(into)
    data, deadline = b"", time.monotonic() + request["seconds"]
    while (left := deadline - time.monotonic()) > 0 and len(data) < MAX_BYTES and select.select([out], [], [], left)[0]:
        if not (piece := os.read(out, 1 << 16)):
            break
        data += piece
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.close(out)
    os.waitpid(pid, 0)
    lines = data.decode(errors="replace").split("\n")[:-1]
    return [json.loads(line[len(nonce) :]) for line in lines if line.startswith(nonce)]


def in_forks(tests: "Tests", request: Request, tell: Tell) -> None:
    """Each run in a fork, in which a function of the loaded program may have other code."""
    functions: dict[tuple[str, int], list[types.FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename.startswith(REPO):
            functions.setdefault((each.__code__.co_filename, each.__code__.co_firstlineno), []).append(each)
    gc.freeze()

    def work(run: Request, tell: Tell) -> None:
        if fault := run.get("fault"):
            change(functions[REPO + fault["path"], fault["first_line"]], fault)
        tests.play(run, tell)

    for run in request["runs"]:
        tell(forked(lambda tell, run=run: work(run, tell), request))


class Tests:
    """A plugin of pytest that calls `work` with itself in place of its loop. `items`: tests by their names; `broken`:
    files that cannot be collected, and why."""

    def __init__(self, seconds: float, work: Callable[["Tests"], None]) -> None:
        self.seconds, self.work = seconds, work
        self.items, self.broken = dict[str, Any](), dict[str, str]()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken[report.nodeid] = str(report.longreprtext).strip().rpartition("\n")[2]

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.work(self)
        return True

    def play(self, run: Request, tell: Tell) -> None:
        """Run tests in order; tell each before it ("begun"), and what came of it after it."""
        for name, why in self.broken.items():
            tell([name, "failed", 0, why[:MAX_TOLD], []])
        gc.enable()
        chosen = [self.items[name] for name in run.get("tests") or self.items if name in self.items]
        signal.signal(signal.SIGALRM, expired)
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            tell([item.nodeid, "begun", 0, "", []])
            seen, begun = Seen(), time.monotonic()
            item.config.pluginmanager.register(seen)
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
            try:
                sys.settrace(seen.trace if run.get("is_traced") else None)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except BaseException as error:  # noqa: BLE001 - also what the alarm raises
                seen.outcomes.add("failed")
                seen.told.append(type(error).__name__)
            finally:
                sys.settrace(None)
                signal.setitimer(signal.ITIMER_REAL, 0)
                item.config.pluginmanager.unregister(seen)
            told, seconds = "\n".join(seen.told)[:MAX_TOLD], round(time.monotonic() - begun, 4)
            tell([item.nodeid, seen.outcome(), seconds, told, sorted(seen.called)])


class Seen:
    """What is seen of one test."""

    def __init__(self) -> None:
        self.outcomes, self.told, self.called = set[str](), list[str](), set[tuple[str, int]]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.outcomes.add("skipped" if hasattr(report, "wasxfail") else report.outcome)
        if report.failed:  # the line of the test that failed, and what was wrong there
            lines = str(report.longreprtext).split("\n")
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or lines[-1]
            self.told += [*[line[1:].strip() for line in lines if line.startswith(">")][:1], str(crash)]

    def trace(self, frame: types.FrameType, _event: str, _arg: Any) -> None:
        if frame.f_code.co_filename.startswith(REPO):
            self.called.add((frame.f_code.co_filename[len(REPO) :], frame.f_code.co_firstlineno))

    def outcome(self) -> str:
        return "failed" if "failed" in self.outcomes else "passed" if self.outcomes == {"passed"} else "skipped"


def expired(*_: Any) -> None:
    raise TimeoutError("it took too long")


def change(functions: list[types.FunctionType], fault: Request) -> None:
    """Give functions the code that they have in a changed statement of their module. ValueError where they cannot."""
    old = functions[0].__code__
    tree = ast.parse(fault["block"])
    ast.increment_lineno(tree, fault["block_line"] - 1)
    flags = old.co_flags & 0x1FE0000  # those of `from __future__ import`
    codes = [compile(tree, old.co_filename, "exec", flags, dont_inherit=True)]
    while (code := codes.pop()).co_firstlineno != old.co_firstlineno or code.co_name != old.co_name:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        if not codes:
            raise ValueError("the function is not there")
    for function in functions:
        function.__code__ = code
        if fault["default"]:
            place, text = fault["default"]
            values = list(function.__defaults__ or ())
            values[-place] = ast.literal_eval(text)
            function.__defaults__ = tuple(values)


if __name__ == "__main__":
    main()
